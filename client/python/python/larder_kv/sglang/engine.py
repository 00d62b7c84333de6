"""SGLang's configuration, as far as it decides about keys."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.utils import get_hash_str

from larder_kv.identity import weights_of
from larder_kv.settings import NodeSettings, UnsupportedError
from larder_kv.sglang.facts import Facts

OF_ENGINE = (
    "model_path revision dtype quantization kv_cache_dtype quantization_param_path json_model_override_args attention_backend "
    "speculative_algorithm speculative_draft_model_path speculative_draft_model_revision mamba_ssm_dtype"
).split()
"""Arguments of the server that change its KV."""
IF_SET = (
    "decrypted_config_file enforce_shared_experts_fusion forward_hooks kt_max_deferred_experts_per_token kt_num_gpu_experts "
    "kt_weight_path modelopt_checkpoint_restore_path speculative_draft_load_format speculative_draft_model_quantization "
    "uno_lora_path"
).split()
"""Others. Engines without them have the namespaces that they always had."""
WEIGHTS = {
    "model_path": "revision",
    "speculative_draft_model_path": "speculative_draft_model_revision",
    "decrypted_config_file": "",
    "kt_weight_path": "",
    "modelopt_checkpoint_restore_path": "",
    "quantization_param_path": "",
    "uno_lora_path": "",
}
"""The arguments that name files, each with the argument of their revision."""


def read(config: Any, page_tokens: int, settings: NodeSettings) -> Facts:
    """The facts of this rank, of SGLang's `HiCacheStorageConfig` and the arguments of its server."""
    if config.should_split_heads:
        raise UnsupportedError(
            "`tp_lcm_size` is not supported: engines share pages with those of their own tensor parallel size"
        )
    arguments = server_arguments()
    details = {name: getattr(arguments, name, None) for name in OF_ENGINE}
    # Random weights have the names of real ones.
    is_dummy = details["is_dummy"] = getattr(arguments, "load_format", None) == "dummy"
    cache = getattr(arguments, "download_dir", None)
    details |= {name: value for name in IF_SET if (value := getattr(arguments, name, None))}
    if "kt_weight_path" in details:
        details["kt_method"] = getattr(arguments, "kt_method", None)
    # This loader quantizes.
    if getattr(arguments, "load_format", None) == "flash_rl":
        details["load_format"] = "flash_rl"
    if leaves_rows_unwritten():
        details["enable_decoder_swa_bounded_replay"] = True
    for name, revision in WEIGHTS.items():
        # If nothing on this host identifies the weights, `model_revision` must; without it the models are refused.
        if (path := details.get(name)) and not settings.model_revision and not is_dummy:
            details[f"{name} weights"] = weights_of(str(path), str(details.get(revision) or "main"), cache)
    # SGLang's hashes name adapters by name and path only. An engine without adapters has the namespace that it always had.
    if adapters := adapters_of(adapters_at_start(), settings):
        details["adapters"] = adapters
        if modules := getattr(arguments, "lora_target_modules", None):
            details["lora_target_modules"] = sorted(modules)
    return Facts(
        model=config.model_name or str(details["model_path"] or ""),
        revision=settings.model_revision,
        page_tokens=page_tokens,
        hash_vector=str(get_hash_str([1, 2, 3, 4_000_000_000], "00" * 32)),
        tp=(config.tp_rank, config.tp_size),
        pp=(config.pp_rank, config.pp_size),
        cp=(config.attn_cp_rank, config.attn_cp_size),
        details=details,
    )


def adapters_of(adapters: Iterable[Any], settings: NodeSettings) -> list[tuple[str, str, str]]:
    """Name, path and fingerprint of each LoRA adapter."""
    found = []
    for adapter in adapters:
        path = str(adapter.lora_path)
        # `model_revision` names what nothing on this host identifies.
        is_told = Path(path).exists() or not settings.model_revision
        found.append((str(adapter.lora_name), path, weights_of(path, "main") if is_told else ""))
    return sorted(found)


def adapters_at_start() -> Iterable[Any]:
    """The LoRA adapters that the server starts with, as SGLang has understood its arguments."""
    from sglang.srt.runtime_context import get_lora

    try:
        lora = get_lora()
        return (lora.lora_paths or ()) if lora.enable_lora else ()
    except (AttributeError, RuntimeError, ValueError):
        return ()


def leaves_rows_unwritten() -> bool:
    """Whether cached pages lack rows of late layers, as SGLang has resolved its arguments (`--enable-decoder-swa-bounded-replay`):
    only engines that compute the end of each prefix again can use them."""
    from sglang.srt.runtime_context import get_exec

    try:
        return bool(get_exec().features.enable_decoder_swa_bounded_replay)
    except (AttributeError, RuntimeError, ValueError):
        return False


def server_arguments() -> Any:
    """The server's arguments; None if this is used without a server."""
    from sglang.srt.runtime_context import get_server_args

    try:
        return get_server_args()
    except (AttributeError, RuntimeError, ValueError):
        return None
