"""Prefetches of requests that wait to be scheduled: the scheduler starts and asks, threads talk to the node."""

import logging
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import larder_kv
from larder_kv.vllm.counts import Counts
from larder_kv.vllm.handoff import Writer, follow_chunks
from larder_kv.vllm.node import Node, Open
from larder_kv.vllm.settings import Settings

logger = logging.getLogger("vllm.larder")


@dataclass
class Prefetch:
    """One request's prefix."""

    request: str
    hashes: list[bytes]
    prompt_tokens: int
    preempted: bool
    writer: Writer | None = None
    """Whose engine computes what is not cached yet."""
    chunks: int | None = None
    """Chunks in place, once that is known."""
    spans: list[tuple[int, int, str]] = field(default_factory=list)
    """Where they were found."""
    lease: larder_kv.Lease | None = None
    """Keeps them in place until they are loaded."""
    follow: larder_kv.Follow | None = None
    """The same for those that are still being written."""
    dropped: bool = False
    ended: threading.Event = field(default_factory=threading.Event)
    """Set when `chunks` is known."""
    was_waited_for: bool = False
    """Whether a step has waited for it."""


class Prefetcher:
    """At most `threads` prefetches are under way; others wait in the order of their arrival."""

    def __init__(self, node: Node, counts: Counts, settings: Settings) -> None:
        self._node, self._counts, self._settings = node, counts, settings
        self._known: dict[str, Prefetch] = {}
        self._changed = threading.Condition()
        # Bounded by the engine's own waiting requests.
        self._waiting: OrderedDict[str, Prefetch] = OrderedDict()
        self._closed = False
        names = (f"larder-prefetch-{number}" for number in range(settings.prefetches))
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for name in names]
        # A prompt that another engine computes is waited for as long as that takes: it has a thread of its own.
        self._handoffs = ThreadPoolExecutor(settings.handoffs, thread_name_prefix="larder-handoff")
        for thread in self._threads:
            thread.start()

    def start(
        self, request: str, hashes: list[bytes], prompt_tokens: int, preempted: bool, writer: Writer | None = None
    ) -> Prefetch:
        """Begins to bring a request's prefix. Without a node or a full chunk nothing is there to bring."""
        self.drop(request)
        prefetch = Prefetch(request, hashes, prompt_tokens, preempted, writer)
        self._known[request] = prefetch
        if self._node.current() is None or not hashes:
            self._counts.add("lookups_without_node" if hashes else "short_prompts")
            prefetch.chunks = 0
            prefetch.ended.set()
            return prefetch
        if writer is not None:
            self._handoffs.submit(self._finish, prefetch)
            return prefetch
        with self._changed:
            self._waiting[request] = prefetch
            self._changed.notify()
        return prefetch

    def find(self, request: str) -> Prefetch | None:
        """The request's prefetch, if one was started."""
        return self._known.get(request)

    def drop(self, request: str) -> None:
        """Gives back what a request holds; it was loaded, or the request has gone."""
        prefetch = self._known.pop(request, None)
        if prefetch is None:
            return
        with self._changed:
            prefetch.dropped = True
            self._waiting.pop(request, None)
        release(prefetch)

    def close(self) -> None:
        """Ends the threads."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        for prefetch in self._known.values():
            prefetch.dropped = True
        for thread in self._threads:
            thread.join()
        self._handoffs.shutdown(cancel_futures=True)
        for request in list(self._known):
            self.drop(request)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                _, prefetch = self._waiting.popitem(last=False)
            self._finish(prefetch)

    def _finish(self, prefetch: Prefetch) -> None:
        chunks = self._bring(prefetch)
        with self._changed:
            prefetch.chunks = chunks
            prefetch.ended.set()
            dropped = prefetch.dropped
        if dropped:
            release(prefetch)

    def _bring(self, prefetch: Prefetch) -> int:
        """Looks up, waits, and returns the chunks that are in place."""
        node = self._node.current()
        if node is None:
            self._counts.add("lookups_without_node")
            return 0
        self._counts.add("lookups")
        try:
            ticket = node.session.lookup_and_prefetch(
                node.namespace,
                node.namespace.chain(prefetch.hashes),
                prompt_tokens=prefetch.prompt_tokens,
                preempted=prefetch.preempted,
                prefill_tokens_per_second=self._settings.prefill_tokens_per_second,
                request=prefetch.request,
            )
            prefetch.spans = [(span.start, span.end, span.tier) for span in ticket.found.spans]
            prefetch.lease = node.session.collect(ticket, wait=self._settings.prefetch_seconds)
            chunks = prefetch.lease.chunks
            self._counts.add("found_tokens", prefetch.lease.tokens)
            if prefetch.writer is not None and chunks < len(prefetch.hashes):
                chunks += self._follow(node, prefetch, prefetch.writer, chunks)
        except larder_kv.LarderError as error:
            if isinstance(error, larder_kv.EndedError):
                self._node.lost(node)
            # What the request held was released where it went away meanwhile.
            if not prefetch.dropped:
                self._counts.add("lookups_failed")
            return 0
        # Whatever it is: without this thread requests would wait for ever.
        except BaseException:
            logger.exception("a prefetch failed")
            self._counts.add("lookups_failed")
            return 0
        return chunks

    def _follow(self, node: Open, prefetch: Prefetch, writer: Writer, first_chunk: int) -> int:
        """Follows the chunks that are not cached yet, until their first layer is there; how many there are."""
        patience = self._settings.handoff_seconds
        follow = prefetch.follow = follow_chunks(node, prefetch.hashes, first_chunk, writer, patience)
        while not prefetch.dropped:
            come = node.session.wait_for_layers(follow, 1, seconds=LOOK_AGAIN_SECONDS)
            if come.layers > 0 or come.is_whole or come.chunks == 0:
                self._counts.add("followed_chunks", come.chunks)
                prefetch.spans.append((first_chunk, first_chunk + come.chunks, "peer"))
                return come.chunks
        return 0


def release(prefetch: Prefetch) -> None:
    """Gives its lease back."""
    lease, prefetch.lease = prefetch.lease, None
    follow, prefetch.follow = prefetch.follow, None
    if lease is not None:
        lease.release()
    if follow is not None:
        follow.release()


LOOK_AGAIN_SECONDS = 0.5
"""How often a hand-over looks whether its request is still there."""
