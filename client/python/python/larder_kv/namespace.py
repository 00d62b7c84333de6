"""An engine's description of its KV: everything that makes its bytes interchangeable."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Pool:
    """One kind of state of a chunk."""

    name: str = "kv"
    """`kv` for attention; else the engine's word."""
    layers: int
    """Layers that one slice holds."""
    layer_bytes: int
    """Bytes of one layer of one chunk in one slice."""
    hit: str | int = "all"
    """Which chunks of a prefix must have it: "all" (attention), "last" (recurrent state), or how many at the end (sliding
    window)."""


@dataclass(frozen=True, kw_only=True)
class NamespaceSpec:
    """Two engines that differ in any of this never see each other's blocks."""

    model: str
    """The model's name or path."""
    revision: str = ""
    """The model's revision; empty where it has none."""
    kv_dtype: str
    """Data type of the KV, in the engine's words."""
    layout: str
    """Order of the bytes inside a block, in the engine's words."""
    hash_algorithm: str = "larder"
    """Who hashes, and how: "larder" (see `Namespace.chain_of_tokens`), or the engine's name for its own hash of 32 bytes."""
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
    """Parts of a chunk that engine ranks hold: tensor times pipeline parallel ranks, or fewer where ranks hold the same KV."""
    pools: Sequence[Pool] = field(default_factory=tuple)
    """Kinds of state of one chunk; the first is called `kv`, and every chunk has it."""
    flat: bool = False
    """Whether keys stand for themselves, without order."""


@dataclass(frozen=True, kw_only=True)
class DescribedChunk:
    """The content of a chunk, block by block as the engine hashes it, for a node's events."""

    hashes: Sequence[bytes]
    """Of each block, 32 bytes; the last one names the chunk."""
    parent: bytes | None
    """The hash of the block before them; None for the first ones of a prompt."""
    tokens: Sequence[int]
    """Of all blocks, each of which has as many."""
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: str = ""
    """By block, what else its hash depends on, as a list in JSON; empty where there is nothing."""


@dataclass(frozen=True, kw_only=True)
class LayerPages:
    """The places of one layer's pages in an engine's memory; all in bytes."""

    region: int
    """Number of the buffer."""
    offset: int
    """Where page 0 begins in it."""
    page_stride: int
    """From one page to the next."""
    pages: int
    """How many there are."""
    dims: Sequence[tuple[int, int]] = ()
    """How often a contiguous run comes and how far apart, outermost first; empty where a page is one run."""
    run_bytes: int
    """Bytes of one run."""


@dataclass(frozen=True)
class IpcMemory:
    """GPU memory of `cudaMalloc` that other processes open by a handle."""

    handle: bytes
    """The 64 bytes of a CUipcMemHandle."""
    offset: int
    """Where what is used begins in the allocation."""
    size: int
    """Bytes used."""


@dataclass(frozen=True)
class DescriptorMemory:
    """GPU memory of the virtual memory interface, exported as a file descriptor."""

    descriptor: int
    """It may be closed when the node knows the memory."""
    size: int
    """Bytes of the allocation."""
