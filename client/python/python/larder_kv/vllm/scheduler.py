"""The connector's scheduler half: prefetches, loads and saves. It waits only a moment for lookups.

Threads hold a prefetch's lease until the workers have their own. A prompt that another engine computes is scheduled when layer 0
of its chunks is there; its load waits for each further layer.
"""

import atexit
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from larder_kv.vllm.actor import ChosenActor
from larder_kv.vllm.counts import Counts
from larder_kv.vllm.describer import Describer
from larder_kv.vllm.engine import Engine
from larder_kv.vllm.events import NodeEvents
from larder_kv.vllm.handoff import attempt_of, params_for_decode, report_of, writer_of
from larder_kv.vllm.held import HeldBlocks, blocks_of
from larder_kv.vllm.hints import NONE, Hints, hints_of
from larder_kv.vllm.keeper import Keeper
from larder_kv.vllm.messages import SavesEnded, StepPlan
from larder_kv.vllm.plan import (
    Load,
    Save,
    Saved,
    load_all_groups,
    plan_load,
    plan_save,
    save_all_groups,
    tokens_by_tier,
)
from larder_kv.vllm.prefetch import Prefetch, Prefetcher
from larder_kv.vllm.published import Published, Removed, Stored
from larder_kv.vllm.router_events import chunk_of, event_of

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.larder")

SOURCES = {
    # GPU memory has only copies of chunks in host memory; the connector reads from host memory.
    "device": CacheHitSource.HOST,
    "host": CacheHitSource.HOST,
    "disk": CacheHitSource.DISK,
    "peer": CacheHitSource.P2P,
    # vLLM has no name for an object store.
    "object": CacheHitSource.EXTERNAL_UNSPECIFIED,
}


AGAIN_AT_ONCE = 256
"""Chunks that are published again with one step."""
IDLE_SECONDS, BUSY_SECONDS = 0.002, 0.000_5
"""How long a step may wait for lookups: after a step without computation, and after a step with computation."""


@dataclass(frozen=True)
class Loading:
    """A load under way."""

    step: int | None
    """The step that needs the load; None for an asynchronous load."""
    pages: frozenset[int]


class SchedulerHalf:
    """The scheduler half. vLLM's scheduler calls it, on its own thread."""

    def __init__(self, engine: Engine, loads: bool, saves: bool) -> None:
        self.shape, self.settings = engine.shape, engine.settings
        self.counts = Counts()
        self._ranks = engine.ranks.count
        self._held: HeldBlocks | None = None
        self._explained = False
        # Whether some prompt could not be described.
        self._is_undescribed = False
        self._loads, self._saves = loads, saves
        # The session reads every rank's slice, so that prefetched chunks are there for all ranks.
        self._actor = ChosenActor(self.settings.device)
        self._node = engine.open_node(range(engine.ranks.slices), 0, self.counts, self._actor)
        self._node.wait_for_first_try(self.settings.reconnect_seconds)
        self._events = self._follow_events() if self.settings.events else None
        self._published = Published(self.shape.chunk_tokens, self.settings.events_tokens != "off")
        self._describer = Describer(self._node)
        self._again: deque[Stored] = deque()
        self._again_at = 0.0
        self._prefetcher = Prefetcher(self._node, self.counts, self.settings)
        self._keeper = Keeper(self._node, self.counts)
        # The hints of requests, only if there are some.
        self._hints: dict[str, Hints] = {}
        self._requests: dict[str, Request] = {}
        self._saved: dict[str, Saved] = {}
        self._planned: list[Load] = []
        self._started_at: dict[str, int] = {}
        # Loads under way, whose leases are given back when they have ended.
        self._loading: dict[str, Loading] = {}
        # Requests with a failed load: another load would likely fail too, so the rest is computed.
        self._unlucky: set[str] = set()
        self._finished: list[str] = []
        self._step, self._recovered = 0, -1
        # Whether the last step computed nothing, and how long the present step may still wait for lookups.
        self._is_idle, self._patience = True, IDLE_SECONDS
        atexit.register(self.close)

    def bind(self, pool: "BlockPool") -> None:
        """Takes the engine's block pool, to count the saves under way; a hybrid model's blocks are held while they are saved."""
        self._held = HeldBlocks(pool, self._ranks)

    def is_holding_blocks(self) -> bool:
        """Whether some blocks become free only with a step in which the workers report that they have saved them."""
        return self._held is not None and self._held.has_blocks()

    def is_copying(self) -> bool:
        """Whether saves or loads are under way. The engine must step until it has heard of their end: then it may pause, and unmap
        its memory. A synchronous load ends with its step."""
        return bool(self._held) or any(load.step is None for load in self._loading.values())

    def on_new_request(self, request: "Request") -> None:
        self._requests[request.request_id] = request
        hints = self._take_hints(request)
        self._saved[request.request_id] = Saved(attempt=attempt_of(request.kv_transfer_params), priority=hints.priority)
        if len(self._requests) == 1:
            self._is_idle, self._patience = True, IDLE_SECONDS
        if self._may_load(request):
            self._start(request)

    def matched_tokens(self, request: "Request", computed: int) -> tuple[int | None, bool]:
        name = request.request_id
        if not self._may_load(request) or name in self._unlucky or name not in self._requests:
            return 0, False
        prefetch = self._prefetcher.find(name)
        # A later session knows nothing of the chunks that an earlier one holds.
        if prefetch is None or prefetch.node is not self._node.current():
            prefetch = self._start(request)
        found = self._look(prefetch)
        if found is None:
            return None, False
        chunks = min(found, self.shape.usable_chunks(request.num_tokens))
        tokens = max(self.shape.hit_tokens(chunks) - computed, 0)
        if tokens > 0:
            self._started_at[name] = computed
        return tokens, tokens > 0 and self.settings.load == "async"

    def update_after_alloc(self, request: "Request", block_ids: tuple[list[int], ...], tokens: int) -> None:
        name = request.request_id
        prefetch = self._prefetcher.find(name)
        if tokens == 0 or prefetch is None:
            # Nothing is loaded, or it is loaded already: the prefetch is not needed any more.
            if name not in self._loading:
                self._prefetcher.drop(name)
            return
        computed = self._started_at.pop(name)
        writer = prefetch.writer if prefetch.follow is not None else None
        table = block_ids[self.shape.number]
        load = plan_load(self.shape, name, prefetch.hashes, computed, tokens, table, writer)
        if self.shape.others:
            assert self._held is not None, "vLLM binds its blocks before the first request"
            load = load_all_groups(self.shape, load, computed, computed + tokens, block_ids, self._held.null)
        self._planned.append(load)
        self._prefetcher.loads(prefetch)
        step = None if self.settings.load == "async" else self._step + 1
        self._loading[name] = Loading(step, frozenset(load.pages))
        saved = self._saved.get(name)
        if saved is not None:
            saved.chunks = max(saved.chunks, (computed + tokens) // self.shape.chunk_tokens)
            saved.hashes = list(prefetch.hashes[: saved.chunks])

    def hit_sources(self, request: "Request", tokens: int) -> dict[CacheHitSource, int]:
        prefetch = self._prefetcher.find(request.request_id)
        planned = next((load for load in self._planned if load.request == request.request_id), None)
        if prefetch is None or planned is None:
            return {CacheHitSource.EXTERNAL_UNSPECIFIED: tokens} if tokens else {}
        start = planned.first_page * self.shape.block_tokens
        by_tier = Counter(tokens_by_tier(prefetch.spans, self.shape, start, tokens))
        # A lookup names no tier for chunks of which other nodes may have a part, as they may for hybrid models.
        by_tier["peer"] += tokens - by_tier.total()
        sources: Counter[CacheHitSource] = Counter()
        for tier, found in by_tier.items():
            sources[SOURCES[tier]] += found
        return dict(+sources)

    def plan_step(self, output: "SchedulerOutput") -> StepPlan:
        self._step += 1
        preempted = sorted(output.preempted_req_ids or ())
        # A reset preempts requests between two steps, and the next step may begin with loads for them.
        resumed = {load.request for load in self._planned}
        for name in preempted:
            # Unfinished saves are stopped, so all chunks of the request are planned anew.
            if name in self._saved:
                self._saved[name] = self._saved[name].anew()
            if name not in resumed:
                self._prefetcher.drop(name)
                self._loading.pop(name, None)
        self._is_idle = output.total_num_scheduled_tokens == 0
        actor, namespace = self._actor.number, self._node.namespace
        plan = StepPlan(self._step, self._recovered, actor, namespace, self._planned, is_idle=self._is_idle)
        plan.preempted, plan.finished = preempted, self._finished
        self._planned, self._finished = [], []
        self._patience = IDLE_SECONDS if self._is_idle else BUSY_SECONDS
        self._prefetcher.go_on()
        if self._saves and output.kv_connector_block_state is not None:
            for name, tokens in output.num_scheduled_tokens.items():
                save = self._plan_save(name, tokens, output.kv_connector_block_state)
                if save is not None:
                    plan.saves.append(save)
        return plan

    def update_output(self, output: "KVConnectorOutput") -> None:
        if isinstance(output.kv_connector_worker_meta, SavesEnded) and self._held is not None:
            self._held.ended(output.kv_connector_worker_meta.ranks)
        # These requests are computed from the first token on, unless they have ended.
        for name in self._requests.keys() & set(output.failed_recving or ()):
            self._unlucky.add(name)
            self._saved[name].chunks = 0
        if output.invalid_block_ids:
            self._recovered = self._step
            blocks = output.invalid_block_ids
            failed = {name for name, load in self._loading.items() if not load.pages.isdisjoint(blocks)}
            self._unlucky |= failed
            # No save was made of a step that computed from missing blocks. These saves are planned anew; the node says which chunks
            # it has. No step computes from the blocks of an asynchronous load.
            for name in self._saved.keys() if self.settings.load == "sync" else self._saved.keys() & failed:
                self._saved[name].chunks = 0
        self._release_loaded(output.finished_recving or ())

    def reset(self) -> bool:
        """Begins with an empty cache. vLLM asks for it when the model's weights change, which no namespace knows. The chunks
        so far belong to other engines too and stay; from now on this engine names its chunks so that no name is known yet."""
        logger.warning("vLLM resets its caches: until it starts again, this engine shares no chunks with other engines")
        self.shape = replace(self.shape, salt=os.urandom(16))
        for name, request in self._requests.items():
            self._prefetcher.drop(name)
            saved = self._saved[name]
            saved.chunks, saved.hashes, saved.is_of_old_weights = 0, [], request.num_computed_tokens > 0
        return True

    def end(self, request: "Request") -> tuple[bool, dict[str, Any] | None]:
        """A request has finished. Returns whether its blocks must stay for now, and the parameters in its answer."""
        if hints := self._hints.pop(request.request_id, None):
            chunks = request.num_computed_tokens // self.shape.chunk_tokens
            self._keeper.ends(hints, self.shape.chunk_hashes(request.block_hashes, chunks))
        told = (self.params_for_decode(request), report_of(request.kv_transfer_params, self._node.current()))
        params = {key: value for one in told if one for key, value in one.items()}
        return self.finished(request), params or None

    def params_for_decode(self, request: "Request") -> dict[str, Any] | None:
        """The parameters in the request's answer for the engine that decodes it."""
        attempt = attempt_of(request.kv_transfer_params)
        if attempt is None or not self._saves or self.shape.salt:
            return None
        chunks = request.num_computed_tokens // self.shape.chunk_tokens
        return params_for_decode(self._node.current(), attempt, self.shape.chunk_hashes(request.block_hashes, chunks))

    def finished(self, request: "Request") -> bool:
        """Whether the request's blocks must stay until the workers have read them."""
        name = request.request_id
        self._requests.pop(name, None)
        saved = self._saved.pop(name, None)
        self._started_at.pop(name, None)
        self._loading.pop(name, None)
        self._unlucky.discard(name)
        self._prefetcher.drop(name)
        # A planned load still goes out: vLLM waits for it.
        if saved is None or not saved.in_flight:
            return False
        self._finished.append(name)
        return True

    def take_events(self) -> "list[KVCacheEvent]":
        """The chunks that the node has gained and lost, in the form of vLLM's events about its own blocks."""
        if self._events is None:
            return []
        told: list[Stored | Removed] = list(self._published.take(self._events.take()))
        again = self.settings.events_again_seconds
        if again is not None and time.monotonic() >= self._again_at:
            self._again_at = time.monotonic() + again
            self._again.clear()
            self._again.extend(self._published.again())
        told += [self._again.popleft() for _ in range(min(len(self._again), AGAIN_AT_ONCE))]
        return [event_of(one) for one in told]

    def close(self) -> None:
        """Ends the work of this half. Threads must not be in native code when the interpreter goes down."""
        atexit.unregister(self.close)
        # The last part is closed first; a part that fails leaves none of the others open.
        with ExitStack() as parts:
            parts.callback(self._node.close)
            parts.callback(self._keeper.close)
            parts.callback(self._prefetcher.close)
            if self._events is not None:
                parts.callback(self._events.close)

    def _take_hints(self, request: "Request") -> Hints:
        """The hints of a request that comes."""
        if not self.settings.hints:
            return NONE
        hints, wrong = hints_of(request.kv_transfer_params, getattr(request, "kv_hints", None))
        self.counts.add("wrong_hints", wrong)
        if hints is not NONE:
            self._hints[request.request_id] = hints
            self._keeper.comes(hints)
        return hints

    def _follow_events(self) -> NodeEvents:
        def place() -> tuple[str, int] | None:
            node = self._node.current()
            return (node.namespace.fingerprint, node.session.device) if node else None

        return NodeEvents(self.settings.events or "", place, self.settings.reconnect_seconds)

    def _may_load(self, request: "Request") -> bool:
        return self._loads and not request.skip_reading_prefix_cache

    def _start(self, request: "Request") -> Prefetch:
        chunks = self.shape.usable_chunks(request.num_tokens)
        hashes = self.shape.chunk_hashes(request.block_hashes, chunks)
        if not hashes:
            self._explain_short_prompts(request.num_tokens)
        self._describe(request, 0, len(hashes))
        preempted = request.num_preemptions > 0
        # No other engine knows the names of chunks with a salt.
        writer = None if self.shape.salt else writer_of(request.kv_transfer_params)
        return self._prefetcher.start(request.request_id, hashes, request.num_tokens, preempted, writer)

    def _look(self, prefetch: Prefetch) -> int | None:
        """The number of chunks that a prefetch has brought, once it is known. Waits a moment for it. If the engine computes for
        other requests, waits once, since a prompt that is not ready yet waits for a whole step. Otherwise waits each time, since
        an idle engine asks without pause."""
        patience = 0.0 if prefetch.was_waited_for and not self._is_idle else self._patience
        before = time.monotonic()
        chunks = self._prefetcher.look(prefetch, patience)
        prefetch.was_waited_for = True
        self._patience = max(self._patience - (time.monotonic() - before), 0)
        return chunks

    def _describe(self, request: "Request", first: int, end: int) -> None:
        """Passes on the tokens of these chunks, which routers need to know. Routers cannot compute names with a salt."""
        if self.shape.salt:
            return
        try:
            self._describe_now(request, first, end)
        except (KeyboardInterrupt, SystemExit):
            raise
        # Catches everything: a prompt that cannot be described, for instance with a very long salt, must not end the engine.
        except BaseException:
            if not self._is_undescribed:
                logger.warning("a prompt's tokens are not passed on (told once)", exc_info=True)
            self._is_undescribed = True

    def _describe_now(self, request: "Request", first: int, end: int) -> None:
        names = self.shape.chunk_hashes(request.block_hashes, end)[first:]
        if self._events is not None and self.settings.events_tokens != "off":
            for chunk, name in enumerate(names, start=first):
                if not self._published.knows(name):
                    self._published.describe(chunk_of(request, self.shape, chunk))
        if self.settings.describe:
            self._describer.say(names, lambda place: chunk_of(request, self.shape, first + place))

    def _explain_short_prompts(self, tokens: int) -> None:
        """Logs once why short prompts never hit."""
        if not self._explained:
            self._explained = True
            logger.info(
                "a prompt of %d tokens is too short for a hit: whole chunks of %d tokens are loaded, and one token at least is "
                "computed; `chunk_tokens` sets the size of chunks",
                tokens,
                self.shape.chunk_tokens,
            )

    def _plan_save(self, name: str, tokens: int, state: "KVConnectorBlockState") -> Save | None:
        """The save of the chunks of a request that a step completes."""
        request, saved = self._requests.get(name), self._saved.get(name)
        if request is None or saved is None or saved.is_of_old_weights:
            return None
        computed = request.num_computed_tokens + tokens
        if computed // self.shape.chunk_tokens <= saved.chunks:
            return None
        tables = state.get_block_ids(name)
        if not tables:
            return None
        save = plan_save(self.shape, name, saved, request.block_hashes, computed, tables[self.shape.number])
        if save is not None:
            self._describe(request, save.first_chunk, len(save.hashes))
        if save is None:
            return None
        assert self._held is not None, "vLLM binds its blocks before the first request"
        if self.shape.others:
            offered = state.boundary_state_offloads.get(name, ())
            states = {(group, boundary): block for group, block, boundary in offered}
            save = save_all_groups(self.shape, save, tables, self._held.null, states)
        return replace(save, number=self._held.hold(blocks_of(save.others)))

    def _release_loaded(self, received: Iterable[str]) -> None:
        """Gives back the leases of loads that have ended."""
        # The last planned step may not have begun.
        ended = [name for name, load in self._loading.items() if load.step is not None and load.step < self._step]
        for name in (*ended, *received):
            self._loading.pop(name, None)
            self._prefetcher.drop(name)
