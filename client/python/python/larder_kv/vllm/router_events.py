"""Chunks in vLLM's own schema of KV events, and the description of chunks from vLLM's requests."""

from typing import TYPE_CHECKING

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from larder_kv.vllm.plan import Shape
from larder_kv.vllm.published import Removed, Stored

if TYPE_CHECKING:
    from vllm.v1.request import Request

LOCAL, OWNER = "LOCAL", "larder"


def event_of(chunk: Stored | Removed) -> KVCacheEvent:
    """The event about a chunk, in the form of vLLM's events about its own blocks."""
    hashes = [maybe_convert_block_hash(BlockHash(one)) for one in chunk.hashes]
    if isinstance(chunk, Removed):
        return BlockRemoved(block_hashes=hashes, medium=MEDIUM_CPU, locality=LOCAL, ownership=OWNER)
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=maybe_convert_block_hash(BlockHash(chunk.parent)) if chunk.parent else None,
        token_ids=list(chunk.tokens),
        block_size=chunk.block_tokens,
        lora_id=chunk.lora_id,
        medium=MEDIUM_CPU,
        lora_name=chunk.lora_name,
        extra_keys=list(chunk.extra_keys) if chunk.extra_keys else None,
        locality=LOCAL,
        ownership=OWNER,
    )


def chunk_of(request: "Request", shape: Shape, chunk: int) -> Stored:
    """A chunk of a request's tokens, block by block as vLLM hashes them."""
    blocks = range(chunk * shape.hashes_per_chunk, (chunk + 1) * shape.hashes_per_chunk)
    tokens = shape.chunk_tokens // shape.hashes_per_chunk
    adapter = request.lora_request
    keys = [generate_block_hash_extra_keys(request, block * tokens, (block + 1) * tokens, 0)[0] for block in blocks]
    return Stored(
        hashes=[bytes(request.block_hashes[block]) for block in blocks],
        parent=bytes(request.block_hashes[blocks.start - 1]) if chunk else None,
        block_tokens=tokens,
        tokens=request.all_token_ids[blocks.start * tokens : blocks.stop * tokens],
        lora_id=adapter.adapter_id if adapter else None,
        lora_name=adapter.name if adapter else None,
        extra_keys=to_event_extra_keys(keys),
    )
