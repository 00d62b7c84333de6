"""The options and the environment of each engine, by its name."""

from pathlib import Path
from typing import Any, NamedTuple

from prompts import CHUNK

BLOCK = 16
"""Tokens of a block on a GPU."""
CPU_BLOCK = 32
OFFLOADED_BYTES = 3 << 30
"""Host memory of vLLM's own offloading."""
TINY_TOKENS = 2_560
"""What the engine that preempts has room for."""

ENVIRONMENT = {
    # Without a network.
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # The engine runs in the process that is asked, so that its ends and its counts are seen there.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Nothing but Triton's kernels is compiled.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TORCHDYNAMO_DISABLE": "1",
    # float32 means float32 in Triton's kernels too.
    "TRITON_F32_DEFAULT": "ieee",
    # Several engines share the processors.
    "OMP_NUM_THREADS": "2",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
"""The environment of every engine."""


class Configuration(NamedTuple):
    """What an engine is started with."""

    options: dict[str, Any]
    environment: dict[str, str]


def configurations(models: Path, socket: str, cpu: bool) -> dict[str, Configuration]:
    """Every engine's configuration."""
    large, small = bfloat16(models / "large", cpu), float32(models / "small", cpu)
    blocks = {"num_gpu_blocks_override": TINY_TOKENS // (CPU_BLOCK if cpu else BLOCK)}
    larder, vllm = connector(socket), offloading()
    tier = {"type": "LarderTier", "module_path": "larder_kv.vllm", "socket": socket}
    tiers = offloading(spec_name="TieringOffloadingSpec", secondary_tiers=[tier])
    options = {
        "alone": large,
        "saver": large | larder,
        "loader": large | larder,
        "exact": small,
        "tiny": small | larder | blocks,
        "offloader": large | vllm,
        "tier-saver": large | tiers,
        "tier-loader": large | tiers,
        "sync": large | connector(socket, load="sync"),
    }
    # The connector refuses "sync" with vLLM's model runner of version 2.
    environments = {"sync": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}
    return {name: Configuration(one, ENVIRONMENT | environments.get(name, {})) for name, one in options.items()}


def bfloat16(model: Path, cpu: bool) -> dict[str, Any]:
    """Options of the large model: vLLM's default attention, and each prompt in one step."""
    options = {"model": str(model), "dtype": "bfloat16", "max_model_len": 8_192, "max_num_seqs": 8}
    if cpu:
        return options | {"block_size": CPU_BLOCK, "max_num_batched_tokens": 8_192}
    memory = {"gpu_memory_utilization": 0.03, "kv_cache_memory_bytes": 3 << 29}
    return options | memory | {"block_size": BLOCK, "max_num_batched_tokens": 6_400}


def float32(model: Path, cpu: bool) -> dict[str, Any]:
    """Options of the small model, for requests that are computed together."""
    options = {"model": str(model), "dtype": "float32", "max_model_len": 2_048, "max_num_seqs": 12}
    if cpu:
        return options | {"block_size": CPU_BLOCK, "max_num_batched_tokens": 2_048}
    memory = {"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 1 << 30, "attention_backend": "TRITON_ATTN"}
    return options | memory | {"block_size": BLOCK, "max_num_batched_tokens": 2_048}


def connector(socket: str, **settings: str) -> dict[str, Any]:
    """Options of an engine with Larder's connector."""
    transfer = {
        "kv_connector": "LarderConnector",
        "kv_connector_module_path": "larder_kv.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": socket, "chunk_tokens": CHUNK} | settings,
    }
    return {"kv_transfer_config": transfer}


def offloading(**settings: object) -> dict[str, Any]:
    """Options of an engine with vLLM's offloading to the CPU."""
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": OFFLOADED_BYTES} | settings,
    }
    return {"kv_transfer_config": transfer}
