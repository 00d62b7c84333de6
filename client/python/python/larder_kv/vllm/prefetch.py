"""Prefetches of requests that wait to be scheduled. The scheduler sends each request to the node as it comes, and asks for the
outcome when the request's turn comes. A thread waits only for a prompt that another engine computes.

The leases of waiting requests are bounded, since a node grants a session only so many: further requests wait for their prefetch,
or begin it when their turn comes. This holds for hand-overs too: a refused one would lose a prompt that is computed already."""

import logging
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

import larder_kv
from larder_kv.link import LOST
from larder_kv.vllm.counts import Counts
from larder_kv.vllm.handoff import Writer, follow_chunks
from larder_kv.vllm.node import Node, Open
from larder_kv.vllm.settings import Settings

logger = logging.getLogger("vllm.larder")

HELD_BLOCKS = 32_768
"""The most blocks that waiting requests hold: half of what a node grants a session by default (`session.max_leased_blocks`). The
other half is for requests that load."""


@dataclass
class Prefetch:
    """The prefetch of one request's prefix."""

    request: str
    hashes: list[bytes]
    prompt_tokens: int
    preempted: bool
    writer: Writer | None = None
    """The engine that computes the chunks that are not cached yet."""
    node: Open | None = None
    """The node that was asked for the prefix."""
    pending: larder_kv.PendingLease | None = None
    """The lease to come."""
    chunks: int | None = None
    """Number of chunks in place, once it is known."""
    spans: list[tuple[int, int, str]] = field(default_factory=list)
    """The tiers in which the chunks were found."""
    lease: larder_kv.Lease | None = None
    """The lease, which keeps the chunks in place until they are loaded."""
    follow: larder_kv.Follow | None = None
    """The follow, which keeps the chunks in place that are still being written."""
    dropped: bool = False
    followed: threading.Event = field(default_factory=threading.Event)
    """Set when the thread that follows a writer has set `chunks`."""
    was_waited_for: bool = False
    """Whether a step has waited for this prefetch."""
    blocks: int = 0
    """Blocks that it holds, or may hold when it ends, while its request waits."""
    not_before: float = 0.0
    """When the node, which was busy, may be asked again."""
    busy_until: float | None = None
    """When a busy node is asked no more; None if the node was not busy."""


class Prefetcher:
    """Starts prefetches. At most `settings.prefetches` are under way at the node; others wait in the order of their arrival."""

    def __init__(self, node: Node, counts: Counts, settings: Settings) -> None:
        self._node, self._counts, self._settings = node, counts, settings
        self._known: dict[str, Prefetch] = {}
        self._dropping = threading.Lock()
        self._prefetches: tuple[Open, larder_kv.Prefetches] | None = None
        # In the order of their arrival: prefetches to be begun, and those that the node has not ended, or whose end is not known.
        self._to_begin: dict[str, Prefetch] = {}
        self._under_way: dict[str, Prefetch] = {}
        # Prompts that other engines compute, for which the node was busy.
        self._refused: deque[tuple[Prefetch, larder_kv.BusyError]] = deque()
        self._held_blocks = 0
        # A prefetch that found no room when its request's turn came, and until when no later request may begin before it: a long
        # prompt would find no room for as long as short ones come. It becomes the first again some time after that.
        self._first: Prefetch | None = None
        self._first_until = 0.0
        # A prompt that another engine computes may take long, so it has a thread of its own.
        self._handoffs = ThreadPoolExecutor(settings.handoffs, thread_name_prefix="larder-handoff")

    def start(
        self, request: str, hashes: list[bytes], prompt_tokens: int, preempted: bool, writer: Writer | None = None
    ) -> Prefetch:
        """Begins to bring a request's prefix, at once or when earlier requests hold less. Without a node or a full chunk there is
        nothing to bring."""
        self.drop(request)
        prefetch = self._known[request] = Prefetch(request, hashes, prompt_tokens, preempted, writer)
        prefetch.node = node = self._node.current()
        if node is None or not hashes:
            self._counts.add("lookups_without_node" if hashes else "short_prompts")
            prefetch.chunks = 0
            return prefetch
        self._counts.add("lookups")
        self._to_begin[request] = prefetch
        self.go_on()
        return prefetch

    def go_on(self) -> None:
        """Hears which prefetches have ended, and begins others as far as there is room: a few of each. Never waits."""
        # The node brings `prefetches` at a time, in the order of their beginning.
        few = 2 * self._settings.prefetches
        self._begin_refused_again()
        for prefetch in list(islice(self._under_way.values(), few)):
            self._hear(prefetch, 0)
        now = time.monotonic()
        for prefetch in list(islice(self._to_begin.values(), few)):
            if prefetch.not_before <= now and not self._begin_one(prefetch):
                break

    def find(self, request: str) -> Prefetch | None:
        """The request's prefetch, if one was started."""
        return self._known.get(request)

    def look(self, prefetch: Prefetch, seconds: float) -> int | None:
        """Number of chunks in place; None if it is not known within `seconds`."""
        self._begin_refused_again()
        if prefetch.chunks is None:
            if prefetch.request not in self._to_begin:
                self._wait(prefetch, seconds)
            elif (pause := prefetch.not_before - time.monotonic()) > 0:
                time.sleep(min(pause, seconds))
            elif self._first is prefetch or not self._keeps_others():
                if not self._begin_one(prefetch):
                    self._found_no_room(prefetch)
                elif prefetch.chunks is None:
                    self._wait(prefetch, seconds)
        return prefetch.chunks

    def loads(self, prefetch: Prefetch) -> None:
        """Notes that a request waits no more: its blocks are being loaded."""
        self._hold(prefetch, 0)

    def drop(self, request: str) -> None:
        """Gives back what a request holds: its prefix was loaded, or the request is gone."""
        prefetch = self._known.pop(request, None)
        if prefetch is None:
            return
        self._waits_no_more(prefetch)
        self._under_way.pop(request, None)
        self._hold(prefetch, 0)
        with self._dropping:
            prefetch.dropped = True
        release(prefetch)

    def close(self) -> None:
        """Ends the threads and gives back what all requests hold."""
        for prefetch in self._known.values():
            prefetch.dropped = True
        self._handoffs.shutdown(cancel_futures=True)
        for request in list(self._known):
            self.drop(request)
        self._prefetches = None

    def _begin_one(self, prefetch: Prefetch) -> bool:
        """Begins a prefetch that has not begun; False if there is no room for it yet."""
        if prefetch.node is None or not self._begin(prefetch, prefetch.node):
            return False
        self._waits_no_more(prefetch)
        return True

    def _keeps_others(self) -> bool:
        """Whether a prompt that found no room keeps later ones from beginning."""
        return self._first is not None and time.monotonic() < self._first_until

    def _found_no_room(self, prefetch: Prefetch) -> None:
        """Has later requests wait for this one, for a limited time: what has the room may be a request that the engine cannot
        schedule yet. They go on for as long before it has its next time."""
        now, seconds = time.monotonic(), self._settings.timeout_seconds
        if self._first is None or now >= self._first_until + seconds:
            self._first, self._first_until = prefetch, now + seconds

    def _waits_no_more(self, prefetch: Prefetch) -> None:
        """Notes that a prefetch waits for room no more."""
        self._to_begin.pop(prefetch.request, None)
        if self._first is prefetch:
            self._first = None

    def _wait(self, prefetch: Prefetch, seconds: float) -> None:
        if prefetch.writer is not None:
            prefetch.followed.wait(seconds)
        elif prefetch.request in self._under_way:
            self._hear(prefetch, seconds)

    def _hold(self, prefetch: Prefetch, blocks: int) -> None:
        self._held_blocks += blocks - prefetch.blocks
        prefetch.blocks = blocks

    def _begin(self, prefetch: Prefetch, node: Open) -> bool:
        """Sends a prefetch to the node; one that cannot be sent brings no chunk. Returns False if waiting requests hold too
        much."""
        try:
            blocks = len(prefetch.hashes) * node.namespace.blocks_per_chunk
            if 0 < self._held_blocks and self._held_blocks + blocks > HELD_BLOCKS:
                return False
            prefetch.pending = self._prefetches_of(node).start(
                node.namespace,
                node.namespace.chain(prefetch.hashes),
                # The node answers after this time at the latest: a later answer would count as none.
                patience=min(self._settings.prefetch_seconds, self._settings.timeout_seconds / 2),
                prompt_tokens=prefetch.prompt_tokens,
                preempted=prefetch.preempted,
                prefill_tokens_per_second=self._settings.prefill_tokens_per_second,
                request=prefetch.request,
            )
        # A panic of the native part is no `Exception`, and the engine must outlive it.
        except BaseException as error:
            self._failed(prefetch, error)
            prefetch.chunks = 0
            return True
        self._hold(prefetch, blocks)
        if prefetch.writer is None:
            self._under_way[prefetch.request] = prefetch
        else:
            self._handoffs.submit(self._follow_writer, prefetch, prefetch.writer)
        return True

    def _hear(self, prefetch: Prefetch, seconds: float) -> int | None:
        """Takes the result of a prefetch under way, if it ends within `seconds`."""
        try:
            prefetch.chunks = self._take(prefetch, seconds)
        except larder_kv.BusyError as error:
            del self._under_way[prefetch.request]
            self._begin_again(prefetch, error)
        if prefetch.chunks is not None:
            self._under_way.pop(prefetch.request, None)
            held = prefetch.lease.chunks if prefetch.lease is not None else 0
            blocks_per_chunk = prefetch.node.namespace.blocks_per_chunk if prefetch.node is not None else 0
            self._hold(prefetch, held * blocks_per_chunk)
        return prefetch.chunks

    def _begin_again(self, prefetch: Prefetch, error: larder_kv.BusyError) -> None:
        """Lets a prefetch that the node was too busy for wait for another try; after `timeout_seconds` of tries it brings no
        chunk."""
        now = time.monotonic()
        prefetch.busy_until = prefetch.busy_until or now + self._settings.timeout_seconds
        prefetch.pending, prefetch.not_before = None, now + error.retry_after
        self._hold(prefetch, 0)
        if now < prefetch.busy_until:
            self._to_begin[prefetch.request] = prefetch
            return
        self._failed(prefetch, error)
        prefetch.chunks = 0

    def _begin_refused_again(self) -> None:
        while self._refused:
            prefetch, error = self._refused.popleft()
            if not prefetch.dropped:
                self._begin_again(prefetch, error)

    def _prefetches_of(self, node: Open) -> larder_kv.Prefetches:
        if self._prefetches is None or self._prefetches[0] is not node:
            self._prefetches = node, larder_kv.Prefetches(node.session, self._settings.prefetches)
        return self._prefetches[1]

    def _take(self, prefetch: Prefetch, seconds: float) -> int | None:
        """Takes the lease, and returns its chunks. Raises `BusyError` if the node grants no lease for now."""
        pending = prefetch.pending
        if pending is None:
            # The prefetch was dropped meanwhile.
            return 0
        try:
            outcome = pending.wait(seconds)
        except larder_kv.BusyError:
            raise
        except BaseException as error:
            self._failed(prefetch, error)
            return 0
        if prefetch.node is not self._node.current():
            # The node was lost meanwhile. Prefetches that wait for their turn there would time out one after the other, and the
            # chunks of a lease may be gone.
            prefetch.pending = None
            pending.cancel()
            if outcome is not None:
                outcome[1].release()
            self._counts.add("lookups_failed")
            return 0
        if outcome is None:
            return None
        found, prefetch.lease = outcome
        prefetch.pending = None
        prefetch.spans = [(span.start, span.end, span.tier) for span in found.spans]
        self._counts.add("found_tokens", prefetch.lease.tokens)
        return prefetch.lease.chunks

    def _follow_writer(self, prefetch: Prefetch, writer: Writer) -> None:
        """Takes the lease, and follows the chunks after it until their first layer is there."""
        chunks = None
        while chunks is None and not prefetch.dropped:
            try:
                chunks = self._take(prefetch, LOOK_AGAIN_SECONDS)
            except larder_kv.BusyError as error:
                # The engine's thread begins prefetches, and counts the blocks that they hold.
                self._refused.append((prefetch, error))
                return
        if chunks is not None and prefetch.lease is not None and chunks < len(prefetch.hashes):
            try:
                chunks += self._follow(prefetch, writer, chunks)
            except larder_kv.BusyError as error:
                # The node has no room for these chunks. The leased chunks are of use without them.
                self._failed(prefetch, error)
            # Catches everything: otherwise the request would wait for ever.
            except BaseException as error:
                self._failed(prefetch, error)
                chunks = 0
        with self._dropping:
            prefetch.chunks = chunks or 0
            prefetch.followed.set()
            dropped = prefetch.dropped
        if dropped:
            release(prefetch)

    def _follow(self, prefetch: Prefetch, writer: Writer, first_chunk: int) -> int:
        """Follows the chunks that are not cached yet, until their first layer is there; returns their number."""
        assert prefetch.node is not None
        node, patience = prefetch.node, self._settings.handoff_seconds
        follow = prefetch.follow = follow_chunks(node, prefetch.hashes, first_chunk, writer, patience)
        while not prefetch.dropped:
            come = node.session.wait_for_layers(follow, 1, seconds=LOOK_AGAIN_SECONDS)
            if come.layers > 0 or come.is_whole or come.chunks == 0:
                self._counts.add("followed_chunks", come.chunks)
                prefetch.spans.append((first_chunk, first_chunk + come.chunks, "peer"))
                return come.chunks
        return 0

    def _failed(self, prefetch: Prefetch, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise error
        if isinstance(error, LOST) and prefetch.node is not None:
            self._node.lost(prefetch.node)
        elif not isinstance(error, larder_kv.LarderError):
            logger.error("a prefetch failed", exc_info=error)
        # The grants of a request that is gone were released meanwhile.
        if not prefetch.dropped:
            self._counts.add("lookups_failed")


def release(prefetch: Prefetch) -> None:
    """Gives back all that a prefetch holds."""
    pending, prefetch.pending = prefetch.pending, None
    lease, prefetch.lease = prefetch.lease, None
    follow, prefetch.follow = prefetch.follow, None
    if pending is not None:
        pending.cancel()
    if lease is not None:
        lease.release()
    if follow is not None:
        follow.release()


LOOK_AGAIN_SECONDS = 0.5
"""How often a hand-over checks whether its request is still there."""
