"""The native part of `larder_kv`: import `larder_kv`, not this module."""

from collections.abc import Sequence
from os import PathLike
from types import TracebackType
from typing import Literal, Self, TypeAlias, final

from typing_extensions import Buffer

from larder_kv.namespace import DescribedChunk, DescriptorMemory, IpcMemory, LayerPages, NamespaceSpec

_Tier: TypeAlias = Literal["device", "host", "disk", "peer", "object"]
_Verify: TypeAlias = Literal["off", "sample", "always"]
_Wait: TypeAlias = Literal["complete", "best_effort"] | float
_Error: TypeAlias = type[BaseException] | BaseException | TracebackType | None

MAX_COPIES: int
"""Limit of the blocks of one copy of GPU memory."""

@final
class Span:
    """A run of chunks in one tier: positions `start` to before `end` of the chain."""

    start: int
    end: int
    tier: _Tier

@final
class Found:
    """How much of a prompt is in the cache."""

    tokens: int
    spans: list[Span]
    pin: int | None

@final
class Progress:
    """The progress of a prefetch."""

    tokens_in_place: int
    tokens_expected: int
    is_done: bool

@final
class Pinned:
    """A pin of chunks in memory; `pin` is 0 if nothing is pinned."""

    pin: int
    chunks: int
    seconds: float

@final
class Stats:
    """Counters of the bytes that a session has moved."""

    bytes_read: int
    bytes_written: int
    bytes_verified: int
    blocks_damaged: int

@final
class Namespace:
    """A namespace that a session has registered. Only this session can use it."""

    @property
    def chunk_tokens(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def blocks_per_chunk(self) -> int: ...
    def block_bytes(self, block: int = 0) -> int: ...
    def chain(self, hashes: Sequence[bytes]) -> Chain:
        """Chunks named by the engine's own 32-byte hashes."""

    def chain_of_tokens(self, tokens: Sequence[int], *, salt: bytes | None = None, lora: bytes | None = None) -> Chain:
        """The full chunks of a prompt under Larder's own hash."""

@final
class Chain:
    """Consecutive chunks of one prompt; in a flat namespace, independent keys."""

    @property
    def hashes(self) -> list[bytes]: ...
    def part(self, start: int, end: int | None = None) -> Chain: ...
    def __len__(self) -> int: ...

@final
class Ticket:
    """A prefetch under way. Dropping it cancels it."""

    @property
    def found(self) -> Found: ...
    @property
    def tokens(self) -> int: ...
    @property
    def tokens_to_recompute(self) -> int: ...
    def cancel(self) -> None: ...

@final
class Prefetches:
    """Starts prefetches of a session and gives their leases later. At most `at_most` are under way at the same time."""

    def __new__(cls, session: Session, at_most: int) -> Self: ...
    def start(self, namespace: Namespace, chain: Chain, *, patience: float, prompt_tokens: int | None = None, preempted: bool = False, prefill_tokens_per_second: float | None = None, request: str | None = None) -> PendingLease:
        """Asks how much of a prompt can be served, and has the node bring these chunks into its memory. After at most `patience`
        seconds, leases the chunks that have come. Sends the request and returns at once."""

@final
class PendingLease:
    """The lease at the end of a prefetch, which may still be under way. Dropping it cancels the prefetch."""

    def wait(self, seconds: float) -> tuple[Found, Lease] | None:
        """Returns the chunks that were found, and the lease of those that came; None if the prefetch does not end within `seconds`.
        Returns the lease once.

        Raises the errors of `lookup_and_prefetch` and `collect`, and `ReleasedError` if the lease was returned before."""
    def cancel(self) -> None: ...

@final
class BlockView(Buffer):
    """A read-only view of a block in the node's memory. The view keeps the lease."""

    def __len__(self) -> int: ...

@final
class Lease:
    """The right to read the first `chunks` chunks of a chain; `chunks` is 0 on a miss."""

    @property
    def chunks(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    def has_block(self, position: int, block: int = 0) -> bool: ...
    def copy_block(self, position: int, out: Buffer, block: int = 0) -> None:
        """Copies a block into `out`, a writable, contiguous buffer of exactly the block's size."""

    def copy_blocks(self, outs: Sequence[Buffer], *, first: int = 0, block: int = 0) -> None:
        """Copies the blocks of the chunks from `first` on, one into each of `outs`; `copy_threads` threads share large copies."""

    def view(self, position: int, block: int = 0) -> BlockView:
        """Returns the block without a copy, for `memoryview`, `numpy.frombuffer` or `torch.frombuffer`."""

    def release(self) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_error: _Error) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *_error: _Error) -> None: ...

@final
class Reservation:
    """The right to write the missing chunks of a chain."""

    @property
    def chunks(self) -> list[int]: ...
    @property
    def pools(self) -> list[list[int]]: ...
    @property
    def seconds(self) -> float: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_error: _Error) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *_error: _Error) -> None: ...

@final
class StagedChunk:
    """Room in the write window for one reserved chunk: fill it, then commit it."""

    @property
    def position(self) -> int: ...
    @property
    def blocks(self) -> list[int]: ...
    def copy_from(self, data: Buffer, *, block: int = 0, offset: int = 0) -> None: ...
    @staticmethod
    def copy_all(staged: Sequence[StagedChunk], sources: Sequence[Buffer], *, block: int = 0) -> None:
        """Copies one source to each staged chunk; `copy_threads` threads share large copies."""

    def drop(self) -> None: ...

@final
class StagedLayers:
    """Room in the write window for layers of reserved chunks: fill it, then hand it over."""

    def copy_from(self, chunk: int, data: Buffer, *, part: int = 0, offset: int = 0) -> None: ...

@final
class InPlace:
    """The followed layers that are in place: the first `layers` layers of the first `chunks` chunks. Later chunks will not come. If
    `is_whole` is true, all layers of these chunks are in place, and nothing more comes."""

    chunks: int
    layers: int
    is_whole: bool

@final
class Follow:
    """Followed chunks: their layers can be read as they come. `lease` has the places of all these chunks. A copy of layers that
    have not come raises `DamagedError`; so does a view of a chunk without any layer. In a view, read only the layers in place."""

    @property
    def in_place(self) -> InPlace: ...
    @property
    def lease(self) -> Lease | None: ...
    def release(self) -> None: ...

@final
class PagedMemory:
    """An engine's KV memory: pages of a fixed number of tokens, each layer's addressed by strides."""

    def __new__(cls, regions: Sequence[Buffer], layers: Sequence[LayerPages], *, pages_per_chunk: int) -> Self: ...
    @property
    def layers(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    def load(
        self, lease: Lease, pages: Sequence[int], *, first_page: int = 0, layer: int | None = None, block: int = 0
    ) -> None:
        """Copies the leased chunks into consecutive pages of the prompt, from page `first_page` of the lease on."""

    def save(
        self, staged: Sequence[StagedChunk], pages: Sequence[int], *, layer: int | None = None, block: int = 0
    ) -> None:
        """Copies pages into the staged chunks, in order."""

    def save_layers(self, staged: StagedLayers, pages: Sequence[int]) -> None:
        """Copies the chunks' pages into the staged layers, in order, in a session of one slice."""

@final
class NodeTensors:
    """An engine's GPU memory that is registered with the node, until the session ends."""

    @property
    def layers(self) -> int: ...

@final
class NodeCopy:
    """A copy by the node. If this object is dropped, the copy goes on, and nothing else uses the memory that it touches."""

    @property
    def progress(self) -> CopyProgress: ...

@final
class CopyProgress:
    """The progress of a copy."""

    @property
    def layers(self) -> int:
        """The number of layers that are done, counted from the first requested layer."""

    @property
    def end(self) -> str | None:
        """The copy's end: "done", "refused", "failed", "stalled" or "lost"; None while the copy goes on. Only after "done" are all
        bytes in their places."""

@final
class Gpu:
    """A GPU of this process, in the context that PyTorch uses. Copies run on their own streams; a thread of this object begins
    them."""

    def __new__(cls, ordinal: int = 0, *, copies: int = 256) -> Self:
        """`ordinal` is the GPU's number, as CUDA counts in this process. At most `copies` copies are under way at a time.

        Raises `GpuError` if there is no driver, the driver is too old, or there is no such GPU."""

    @property
    def name(self) -> str: ...
    def choices(self) -> list[str]:
        """Tells people how copies of each shape are made, and how fast each way was."""

@final
class GpuPagedMemory:
    """An engine's KV memory on a GPU: pages of a fixed number of tokens, each layer's addressed by strides.

    Sizes and strides are multiples of 16 bytes. Copies begin at once: the engine's streams must have finished their work on these
    pages. When a copy returns, any stream may read its bytes. A copy that fails raises `GpuError`."""

    def __new__(
        cls, gpu: Gpu, regions: Sequence[tuple[int, int]], layers: Sequence[LayerPages], *, pages_per_chunk: int
    ) -> Self:
        """`regions` are allocations that outlive this object, each as its address on the GPU and its size in bytes."""

    @property
    def layers(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    def load(
        self, lease: Lease, pages: Sequence[int], *, first_page: int = 0, layer: int | None = None, block: int = 0
    ) -> None:
        """Copies the leased chunks into consecutive pages of the prompt, from page `first_page` of the lease on."""

    def save(
        self, staged: Sequence[StagedChunk], pages: Sequence[int], *, layer: int | None = None, block: int = 0
    ) -> None:
        """Copies pages into the staged chunks, in order. A chunk whose copy fails is dropped."""

    def save_layers(self, staged: StagedLayers, pages: Sequence[int]) -> None:
        """Copies the chunks' pages into the staged layers, in order, in a session of one slice. If a copy fails, the staged layers
        are dropped."""

@final
class ScatteredMemory:
    """An engine's memory in which a block is one or more pieces, each given by its address."""

    def __new__(cls, regions: Sequence[Buffer]) -> Self: ...
    def load(
        self,
        lease: Lease,
        addresses: Sequence[int],
        sizes: Sequence[int],
        *,
        chunks: int | None = None,
        block: int = 0,
    ) -> None:
        """Copies the first `chunks` leased chunks (all if not given) to pieces. The pieces, in order, hold the chunks' blocks, in
        order. A piece outside of the regions is refused."""

    def save(
        self, staged: Sequence[StagedChunk], addresses: Sequence[int], sizes: Sequence[int], *, block: int = 0
    ) -> None:
        """Copies pieces to staged chunks. The pieces, in order, hold the chunks' blocks, in order."""

# Below is what client/python/stub makes of src/session.rs.

@final
class Session:
    """A session with the node on this host: `Session(path)`, where `path` is the tenant's socket. Threads share it; each of its
    methods waits without the interpreter's lock, and requests of several threads are under way at the same time.

    `client` is the caller's name, for the node's log; `device` is the number of the GPU actor (if not given, the actor with the
    fewest sessions); `window_bytes` is the requested write window, 0 for a session that never writes; `timeout` is in seconds,
    for each request. `verify` says which blocks are verified when they are read: "off", "sample" (one in 64, chosen by
    `verify_seed`, at random if not given) or "always". A wrong block raises `DamagedError`, and the node is told. Copies of 4 MiB
    and more take up to `copy_threads` threads, the calling one among them; 0 is half of the process's CPUs, at most 4.

    The session ends when it was closed, by `close()` or as a context manager, or dropped, and its last lease, ticket and
    reservation are gone. It belongs to the process that opened it: after a fork, the child gets `ForkedError`.

    Raises `ConnectError` if nobody listens there, `BusyError` and `RefusedError` if the node wants no session now."""

    def __new__(cls, path: str | PathLike[str], *, client: str | None = None, device: int | None = None, window_bytes: int = 64 << 20, timeout: float = 10.0, verify: _Verify = "sample", verify_seed: int | None = None, copy_threads: int = 0) -> Self: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_error: _Error) -> None: ...
    def register(self, spec: NamespaceSpec, *, slices: Sequence[int] | None = None) -> Namespace:
        """Registers a namespace: `spec` is a `NamespaceSpec`, `slices` are those that this session reads and writes (slice 0 if not
        given).

        Raises `ValueError` if the namespace is impossible, `RefusedError` if the node refuses it, or if this session registered it
        with other slices."""
    def lookup(self, namespace: Namespace, chain: Chain, *, prompt_tokens: int | None = None, skip_read: bool = False, preempted: bool = False, tiers: Sequence[_Tier] = (), pin_seconds: float | None = None, prefill_tokens_per_second: float | None = None) -> Found:
        """Asks how much of a prompt is in the cache. Nothing found is a result with 0 tokens.

        `prompt_tokens`: tokens of the whole prompt; the answer leaves at least one of them to compute. `skip_read`: the caller
        cannot use a hit, so the lookup is counted apart. `preempted`: the request had been preempted. `tiers`: the tiers to look
        in ("device", "host", "disk", "peer", "object"; all if empty). `pin_seconds`: pin the found chunks for this time.
        `prefill_tokens_per_second`: how fast the engine computes; the node counts the seconds of prefill that a hit saves."""
    def lookup_and_prefetch(self, namespace: Namespace, chain: Chain, *, prompt_tokens: int | None = None, skip_read: bool = False, preempted: bool = False, tiers: Sequence[_Tier] = (), pin_seconds: float | None = None, prefill_tokens_per_second: float | None = None, request: str | None = None) -> Ticket:
        """Asks how much of a prompt can be served. Meanwhile the node brings these chunks into its memory, from disk and other
        nodes. The options are those of `lookup`. If `prefill_tokens_per_second` is given, only chunks that come sooner than the
        engine computes them are brought. `request`: the engine's own id of the request, by which `larder explain` finds it."""
    def progress(self, ticket: Ticket) -> Progress:
        """Asks how far a prefetch is."""
    def collect(self, ticket: Ticket, *, wait: _Wait = "complete") -> Lease:
        """Ends a prefetch and leases the contiguous prefix that has come. `wait` is "complete" (until all has come or failed to
        come), "best_effort" (what has come by now) or a number of seconds, by which the session's timeout is longer for this
        request."""
    def lease(self, namespace: Namespace, chain: Chain) -> Lease:
        """Asks to read the longest prefix of `chain` that is here or can be brought in time. A miss is a lease of 0 chunks.

        Raises `BusyError` if the session reads too much already."""
    def reserve(self, namespace: Namespace, chain: Chain, *, priority: int = 0, attempt: int = 0, pools: Sequence[Sequence[int]] | None = None) -> Reservation:
        """Asks for room for those chunks of `chain` that are missing. `priority` is 0 for ordinary traffic; chunks of a higher
        priority stay longer under the `priority` policy. If `attempt` is not 0, the reservations of earlier attempts for these
        chunks end. `pools` says, for each chunk, the numbers of the pools that will be written, all if not given: pools that
        every chunk has are written whether named or not, others may be added later.

        Raises `BusyError` if there is no room."""
    def stage(self, reservation: Reservation, position: int) -> StagedChunk:
        """Gives the reserved chunk at `position` (in the chain) room to be filled; waits until the write window has some.

        Raises `WindowError` if a chunk is larger than the window, `RequestTimeout` if no room was freed in time."""
    def stage_chunks(self, reservation: Reservation, positions: Sequence[int]) -> list[StagedChunk]:
        """Gives the reserved chunks at `positions` room to be filled, as `stage` does for one; all get it at once.

        Raises as `stage`: `WindowError` if the chunks together are larger than the window."""
    def commit(self, reservation: Reservation, staged: Sequence[StagedChunk]) -> int:
        """Hands filled chunks of one reservation over, and returns how many the node keeps.

        Raises `BusyError` if the node copies too much at the moment: then the chunks are still staged, and may be committed again."""
    def stage_layers(self, reservation: Reservation, positions: Sequence[int], start: int, end: int, *, pool: int = 0) -> StagedLayers:
        """Takes room in the write window for layers `start` to before `end` of one pool of reserved chunks, to be filled. Waits
        until there is room. `positions` are the chunks' positions in the chain, ascending.

        Raises `WindowError` if the layers are larger than the window, `RequestTimeout` if no room was freed in time."""
    def hand_over(self, staged: StagedLayers) -> None:
        """Hands filled layers over: followers of the chunks may read them. When all layers of the chunks were handed over,
        `commit_handed_over` commits the chunks.

        Raises `RefusedError` if the reservation has ended, by its deadline or a later attempt; `BusyError` if the node copies too
        much at the moment: then the layers are still staged, and may be handed over again."""
    def commit_handed_over(self, reservation: Reservation, positions: Sequence[int]) -> int:
        """Commits chunks of which all layers were handed over, and returns how many the node keeps.

        Raises `RefusedError` if layers are missing."""
    def follow(self, namespace: Namespace, chain: Chain, *, node: str | None = None, device: int = 0, attempt: int = 0, patience: float = 10.0) -> Follow:
        """Follows chunks that are being written, or soon will be: on this node, or by an engine that talks to the actor `device` of
        the node `node`; its layers come as it hands them over. Room for these chunks is taken at once, for all or for none.
        Layers of an earlier attempt than `attempt` do not count; chunks of which nothing comes for `patience` seconds are lost.

        Raises `BusyError` if there is no room."""
    def wait_for_layers(self, follow: Follow, layers: int, *, seconds: float = 1.0) -> InPlace:
        """Waits until `layers` layers of the followed chunks are in place, or nothing more will come, or `seconds` have passed.
        Returns what is in place then."""
    def describe(self, namespace: Namespace, chunks: Sequence[DescribedChunk]) -> None:
        """Describes the tokens of chunks, for the events of a node that publishes tokens (`[kv_events] tokens`); other nodes drop
        the description. Never waits.

        Raises `ValueError` if the blocks of a chunk do not have equally many tokens, or a chunk has more of anything than a node
        takes."""
    def register_tensors(self, namespace: Namespace, memory: Sequence[IpcMemory | DescriptorMemory], layers: Sequence[LayerPages], *, pages_per_chunk: int, block: int = 0) -> NodeTensors:
        """Registers GPU memory for copies by the node. `memory` has, as `larder_kv.IpcMemory` or `larder_kv.DescriptorMemory`, the
        regions that `layers` name; the rest is as for `GpuPagedMemory`. These layers hold the block `block` of each chunk.

        Raises `RefusedError` if there is no GPU that the node could use, or this memory cannot be shared."""
    def load_pages(self, tensors: NodeTensors, lease: Lease, pages: Sequence[int], *, first_page: int = 0, layers: tuple[int, int] | None = None) -> NodeCopy:
        """Has the node begin to copy leased blocks into `pages`: consecutive pages of the prompt, from number `first_page` on,
        counted from the lease's first chunk. `layers` are first and end, all layers if not given. The lease may be given back
        meanwhile. The engine's streams must have finished their work on these pages.

        Raises `BusyError` if too many copies are under way."""
    def save_pages(self, tensors: NodeTensors, reservation: Reservation, positions: Sequence[int], pages: Sequence[int], *, layers: tuple[int, int] | None = None) -> NodeCopy:
        """Has the node begin to copy `pages`, chunk by chunk, into the reserved chunks at `positions`. When all layers are done,
        `commit_handed_over` commits the chunks. If a copy does not end as "done", its chunks are given up.

        Raises `BusyError` if too many copies are under way."""
    def wait_for_copy(self, copy: NodeCopy, layers: int | None = None, *, seconds: float = 10.0) -> CopyProgress:
        """Waits until `layers` layers of a copy are done, or it has ended, or `seconds` have passed, and says how far it is then.
        Layers that are done may be used while the others are under way. Waits for the end if `layers` is not given."""
    def pin(self, namespace: Namespace, chain: Chain, seconds: float) -> Pinned:
        """Keeps the longest prefix of `chain` that is here from eviction, for `seconds`, or for as long as the node grants."""
    def unpin(self, pin: int) -> None:
        """Ends a pin before its deadline."""
    @property
    def tenant(self) -> str: ...
    @property
    def node(self) -> str: ...
    @property
    def device(self) -> int: ...
    @property
    def window_bytes(self) -> int: ...
    @property
    def is_open(self) -> bool: ...
    def stats(self) -> Stats: ...
    def close(self) -> None: ...

@final
class AsyncSession:
    """A session with the node on this host, for asyncio: await `AsyncSession.connect(path)`. The parameters and errors are those of
    `Session`. Many requests may be under way at the same time. Cancelling one is safe: what a late answer grants is given back."""

    @staticmethod
    async def connect(path: str | PathLike[str], *, client: str | None = None, device: int | None = None, window_bytes: int = 64 << 20, timeout: float = 10.0, verify: _Verify = "sample", verify_seed: int | None = None, copy_threads: int = 0) -> AsyncSession: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *_error: _Error) -> None: ...
    async def register(self, spec: NamespaceSpec, *, slices: Sequence[int] | None = None) -> Namespace: ...
    async def lookup(self, namespace: Namespace, chain: Chain, *, prompt_tokens: int | None = None, skip_read: bool = False, preempted: bool = False, tiers: Sequence[_Tier] = (), pin_seconds: float | None = None, prefill_tokens_per_second: float | None = None) -> Found: ...
    async def lookup_and_prefetch(self, namespace: Namespace, chain: Chain, *, prompt_tokens: int | None = None, skip_read: bool = False, preempted: bool = False, tiers: Sequence[_Tier] = (), pin_seconds: float | None = None, prefill_tokens_per_second: float | None = None, request: str | None = None) -> Ticket: ...
    async def progress(self, ticket: Ticket) -> Progress: ...
    async def collect(self, ticket: Ticket, *, wait: _Wait = "complete") -> Lease: ...
    async def lease(self, namespace: Namespace, chain: Chain) -> Lease: ...
    async def reserve(self, namespace: Namespace, chain: Chain, *, priority: int = 0, attempt: int = 0, pools: Sequence[Sequence[int]] | None = None) -> Reservation: ...
    async def stage(self, reservation: Reservation, position: int) -> StagedChunk: ...
    async def stage_chunks(self, reservation: Reservation, positions: Sequence[int]) -> list[StagedChunk]: ...
    async def commit(self, reservation: Reservation, staged: Sequence[StagedChunk]) -> int: ...
    async def stage_layers(self, reservation: Reservation, positions: Sequence[int], start: int, end: int, *, pool: int = 0) -> StagedLayers: ...
    async def hand_over(self, staged: StagedLayers) -> None: ...
    async def commit_handed_over(self, reservation: Reservation, positions: Sequence[int]) -> int: ...
    async def follow(self, namespace: Namespace, chain: Chain, *, node: str | None = None, device: int = 0, attempt: int = 0, patience: float = 10.0) -> Follow: ...
    async def wait_for_layers(self, follow: Follow, layers: int, *, seconds: float = 1.0) -> InPlace: ...
    async def describe(self, namespace: Namespace, chunks: Sequence[DescribedChunk]) -> None: ...
    async def register_tensors(self, namespace: Namespace, memory: Sequence[IpcMemory | DescriptorMemory], layers: Sequence[LayerPages], *, pages_per_chunk: int, block: int = 0) -> NodeTensors: ...
    async def load_pages(self, tensors: NodeTensors, lease: Lease, pages: Sequence[int], *, first_page: int = 0, layers: tuple[int, int] | None = None) -> NodeCopy: ...
    async def save_pages(self, tensors: NodeTensors, reservation: Reservation, positions: Sequence[int], pages: Sequence[int], *, layers: tuple[int, int] | None = None) -> NodeCopy: ...
    async def wait_for_copy(self, copy: NodeCopy, layers: int | None = None, *, seconds: float = 10.0) -> CopyProgress: ...
    async def pin(self, namespace: Namespace, chain: Chain, seconds: float) -> Pinned: ...
    async def unpin(self, pin: int) -> None: ...
    @property
    def tenant(self) -> str: ...
    @property
    def node(self) -> str: ...
    @property
    def device(self) -> int: ...
    @property
    def window_bytes(self) -> int: ...
    @property
    def is_open(self) -> bool: ...
    def stats(self) -> Stats: ...
    def close(self) -> None: ...
