"""What the connector takes from vLLM's configuration; it refuses by name what it cannot serve."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED
from vllm.v1.kv_cache_interface import FullAttentionSpec, iter_layer_specs

import larder_kv
from larder_kv.identity import weights_digest
from larder_kv.settings import UnsupportedError
from larder_kv.vllm.facts import Facts
from larder_kv.vllm.hashes import checked_seed
from larder_kv.vllm.layout import LAYOUTS
from larder_kv.vllm.node import Node
from larder_kv.vllm.plan import Shape
from larder_kv.vllm.settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

ELSEWHERE = ("_name_or_path", "transformers_version")


@dataclass(frozen=True)
class Engine:
    """One rank of an engine, or its scheduler."""

    settings: Settings
    facts: Facts
    shape: Shape
    layer_names: Sequence[str]
    blocks: int
    """Blocks of the engine's cache."""
    tensor_rank: int
    replicas: int
    """Consecutive ranks that hold the same KV."""

    @classmethod
    def of(cls, config: "VllmConfig", kv: "KVCacheConfig") -> "Engine":
        """Reads the configuration, and refuses what is not supported."""
        transfer = config.kv_transfer_config
        assert transfer is not None
        settings = Settings.parse(transfer.kv_connector_extra_config)
        refuse_unsupported(config, kv, settings)
        (group,) = kv.kv_cache_groups
        spec = next(iter(iter_layer_specs(group.kv_cache_spec)))
        parallel = config.parallel_config
        block_tokens = spec.block_size
        shape = Shape(settings.chunk_for(block_tokens), block_tokens)
        replicas = kv.kv_tp_replicas
        algorithm = config.cache_config.prefix_caching_hash_algo
        function = get_hash_fn_by_name(algorithm)
        seed = os.environ.get("PYTHONHASHSEED", DEFAULT_NONE_HASH_SEED)
        model = config.model_config
        facts = Facts(
            model=model.model,
            revision=settings.model_revision or model.revision or "",
            kv_dtype=f"{config.cache_config.cache_dtype} {spec.dtype}".replace("torch.", ""),
            layout=str(kv.kv_cache_layout),
            hash_algorithm=algorithm,
            hash_seed=checked_seed(algorithm, seed, function),
            chunk_tokens=shape.chunk_tokens,
            block_tokens=block_tokens,
            tensor_parallel=parallel.tensor_parallel_size,
            slices=parallel.tensor_parallel_size // replicas,
            layers=len(group.layer_names),
            page_bytes=spec.unpadded_page_size_bytes,
            details=details(config, group.layer_names, spec, settings),
        )
        rank = parallel.rank % parallel.tensor_parallel_size
        return cls(settings, facts, shape, group.layer_names, kv.num_blocks, rank, replicas)

    def slice_of_rank(self) -> int:
        """The slice that this rank holds."""
        return self.tensor_rank // self.replicas

    def writes_its_slice(self) -> bool:
        """Whether this rank is the one that saves its slice."""
        return self.settings.save and self.tensor_rank % self.replicas == 0

    def open_node(self, slices: Sequence[int], window_bytes: int) -> Node:
        """Opens the way to the node on this host."""
        settings = self.settings

        def open_session() -> larder_kv.Session:
            return larder_kv.Session(
                settings.socket,
                client="larder-kv for vLLM",
                device=settings.device,
                window_bytes=window_bytes,
                timeout=settings.timeout_seconds,
            )

        return Node(open_session, self.facts.namespace(), list(slices), settings.reconnect_seconds)


def refuse_unsupported(config: "VllmConfig", kv: "KVCacheConfig", settings: Settings) -> None:
    """Refuses what would not be served, or not rightly."""
    parallel = config.parallel_config
    if config.speculative_config is not None:
        raise UnsupportedError("speculative decoding has pools of its own and is not supported: turn it off")
    if len(kv.kv_cache_groups) != 1:
        raise UnsupportedError(
            f"the model has {len(kv.kv_cache_groups)} KV cache groups (hybrid attention): only one is supported"
        )
    (group,) = kv.kv_cache_groups
    specs = list(iter_layer_specs(group.kv_cache_spec))
    if not all(isinstance(spec, FullAttentionSpec) for spec in specs):
        raise UnsupportedError("only models with full attention in every layer (MLA included) are supported")
    if len({(spec.unpadded_page_size_bytes, spec.block_size) for spec in specs}) != 1:
        raise UnsupportedError("layers with blocks of different sizes are not supported")
    if parallel.pipeline_parallel_size != 1:
        raise UnsupportedError("pipeline parallelism is not supported")
    if parallel.decode_context_parallel_size != 1 or parallel.prefill_context_parallel_size != 1:
        raise UnsupportedError("context parallelism is not supported")
    if kv.kv_cache_layout not in LAYOUTS:
        raise UnsupportedError(f"unknown KV cache layout {kv.kv_cache_layout!r}: known are {', '.join(LAYOUTS)}")
    if not config.cache_config.enable_prefix_caching:
        raise UnsupportedError("prefix caching is off, so that blocks have no hashes: turn it on")
    if kv.hash_block_size not in (None, specs[0].block_size):
        raise UnsupportedError("hashes of other runs of tokens than a block are not supported")
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise UnsupportedError("calculate_kv_scales gives each process scales of its own: turn it off")
    if settings.load == "sync" and parallel.tensor_parallel_size != 1:
        raise UnsupportedError('`load` is "sync": with several ranks only "async" is supported')


def details(config: "VllmConfig", layer_names: Sequence[str], spec: Any, settings: Settings) -> dict[str, object]:
    """What changes KV bytes and has no field of its own in a namespace."""
    model = config.model_config
    folder = Path(model.model)
    # Where the configuration was read from, and by what, changes no number.
    known = {key: value for key, value in model.hf_text_config.to_dict().items() if key not in ELSEWHERE}
    return {
        "commit": getattr(model.hf_config, "_commit_hash", None),
        "config": known,
        "dtype": str(model.dtype),
        "layers": list(layer_names),
        "quantization": model.quantization,
        "spec": str(spec),
        "weights": settings.model_revision or (weights_digest(folder) if folder.is_dir() else ""),
    }
