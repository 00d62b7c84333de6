"""How kernels pack keys and values inside a page. On GPUs a page is as vLLM describes it. On CPUs its order depends on the host's
instructions and on vLLM's build, and vLLM has no name for it."""

import hashlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import AttentionSpec, MLAAttentionSpec, SlidingWindowMLASpec

from larder_kv.identity import abilities_of_cpu
from larder_kv.settings import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def packing_of(config: "VllmConfig", specs: Sequence[Any]) -> object:
    """Tells apart how pages are packed; `specs` are vLLM's descriptions of the groups. Raises `UnsupportedError` if nothing
    does."""
    if config.device_config.device_type != "cpu":
        return "as described"
    try:
        return {"cpu": sorted({packed_on_cpu(config, spec) for spec in specs})}
    # A kernel refuses a shape by various errors, and another vLLM may have other functions.
    except Exception as error:
        raise UnsupportedError(
            f"nothing tells how vLLM packs the KV cache on this host's CPU, so it is not supported: {error!r}"
        ) from error


def packed_on_cpu(config: "VllmConfig", spec: Any) -> str:
    """A digest of a page with known keys and values, written by vLLM's kernel. Kernels of latent attention and recurrent state
    write more than they are given; vLLM chooses them by the CPU's abilities."""
    import torch
    from vllm.v1.attention.backend import AttentionType
    from vllm.v1.attention.backends import cpu_attn

    if not isinstance(spec, AttentionSpec) or isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
        return abilities_of_cpu()
    dtype, kv_dtype = config.model_config.dtype, config.cache_config.cache_dtype
    tokens, size = spec.block_size, spec.head_size
    # Small whole numbers, which every data type holds exactly.
    known = hashlib.shake_256(b"larder").digest(2 * tokens * size)
    keys, values = (torch.frombuffer(bytearray(known), dtype=torch.uint8) % 15 + 1).to(dtype).view(2, tokens, 1, size)
    page = torch.zeros((1, 1, tokens, 2 * size), dtype=spec.dtype)
    isa = cpu_attn._get_attn_isa(dtype, tokens, size, kv_dtype)
    layer = SimpleNamespace(isa=isa, _k_scale_float=1.0, _v_scale_float=1.0)
    attention = SimpleNamespace(attn_type=AttentionType.DECODER, kv_cache_dtype=kv_dtype)
    cpu_attn.CPUAttentionBackendImpl.do_kv_cache_update(attention, layer, keys, values, page, torch.arange(tokens))
    return hashlib.sha256(page.view(torch.uint8).numpy().tobytes()).hexdigest()
