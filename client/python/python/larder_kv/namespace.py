"""An engine's description of its KV: all facts that make its bytes interchangeable."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Pool:
    """One kind of state of a chunk."""

    name: str = "kv"
    """`kv` for attention; otherwise the engine's name for this state."""
    layers: int
    """Layers that one slice holds."""
    layer_bytes: int
    """Bytes of one layer of one chunk in one slice."""
    hit: str | int = "all"
    """The chunks of a prefix that must have this state: "all" (attention), "last" (recurrent state), or a number of chunks at the
    end (sliding window)."""


@dataclass(frozen=True, kw_only=True)
class NamespaceSpec:
    """The identity of an engine's KV. Two engines that differ in any field never see each other's blocks."""

    model: str
    """The model's name or path."""
    revision: str = ""
    """The model's revision; empty if it has none."""
    kv_dtype: str
    """Data type of the KV, in the engine's words."""
    layout: str
    """Order of the bytes inside a block, in the engine's words."""
    hash_algorithm: str = "larder"
    """The hash of chunks: "larder" (see `Namespace.chain_of_tokens`), or the engine's name for its own hash of 32 bytes."""
    hash_seed: str = ""
    """The seed that the engine's hash starts from; never one that each process draws for itself."""
    chunk_tokens: int = 256
    """Tokens of one chunk."""
    engine_block_tokens: int = 16
    """Tokens of one engine block (page); divides `chunk_tokens`."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    slices: int = 1
    """Parts of a chunk that engine ranks hold: tensor times pipeline parallel ranks, or fewer if ranks hold the same KV."""
    pools: Sequence[Pool] = field(default_factory=tuple)
    """Kinds of state of one chunk; the first is called `kv`, and every chunk has it."""
    flat: bool = False
    """Whether keys stand for themselves, without order."""


@dataclass(frozen=True, kw_only=True)
class DescribedChunk:
    """The content of a chunk, block by block as the engine hashes it, for a node's events."""

    hashes: Sequence[bytes]
    """The hash of each block, 32 bytes; the last hash names the chunk."""
    parent: bytes | None
    """The hash of the block before the chunk; None for the first chunk of a prompt."""
    tokens: Sequence[int]
    """The tokens of all blocks; all blocks have equally many."""
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: str = ""
    """A JSON list with the other inputs of each block's hash; empty if there are none."""


@dataclass(frozen=True, kw_only=True)
class LayerPages:
    """The places of one layer's pages in an engine's memory; all in bytes."""

    region: int
    """Number of the buffer."""
    offset: int
    """The offset of page 0 in the buffer."""
    page_stride: int
    """From one page to the next."""
    pages: int
    """The number of pages."""
    dims: Sequence[tuple[int, int]] = ()
    """The number of runs and the distance between them in each dimension, outermost first; empty if a page is one run."""
    run_bytes: int
    """Bytes of one run."""


@dataclass(frozen=True)
class IpcMemory:
    """GPU memory of `cudaMalloc` that other processes open by a handle."""

    handle: bytes
    """The 64 bytes of a CUipcMemHandle."""
    offset: int
    """The offset of the used part in the allocation."""
    size: int
    """Bytes used."""


@dataclass(frozen=True)
class DescriptorMemory:
    """GPU memory of the virtual memory interface, exported as a file descriptor."""

    descriptor: int
    """The exported descriptor. It may be closed once the node knows the memory."""
    size: int
    """Bytes of the allocation."""
