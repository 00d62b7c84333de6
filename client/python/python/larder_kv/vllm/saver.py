"""The worker half's saves of the engine's blocks, on a thread of their own: whole chunks, or layer by layer."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import larder_kv
from larder_kv.link import LOST, MOST_REASONS, is_too_large
from larder_kv.patience import Patience
from larder_kv.vllm.counts import Counts
from larder_kv.vllm.handoff import attempt_to_write, hand_over_layer
from larder_kv.vllm.memory import ChunkBlocks, Memory, MemoryLayer, Pages
from larder_kv.vllm.node import Node, Open
from larder_kv.vllm.plan import Save, Shape
from larder_kv.vllm.settings import Settings
from larder_kv.vllm.transfer import LayerGate

logger = logging.getLogger("vllm.larder")

TOKEN_FIRST_SECONDS = 0.003
"""How long a save waits after its step. In this time the engine's thread samples the step's tokens and hands them out; it needs
the interpreter's lock and the processors for that."""


RESERVED_PARTS = 4
"""The most half windows of chunks for which room is taken at once."""


@dataclass
class SaveJob:
    """A save that is waiting or under way."""

    save: Save
    gate: LayerGate
    """The layers that the step has computed."""
    cancelled: bool = False
    saved: int = 0
    """Chunks that the node has by now, from the first on."""
    patience: Patience = field(default_factory=Patience)
    """How long this save still waits for a busy node."""
    chunks: int = field(init=False)
    not_before: float = field(init=False)

    def __post_init__(self) -> None:
        self.not_before = time.monotonic() + TOKEN_FIRST_SECONDS
        self.chunks = len(self.save.hashes) - self.save.first_chunk


class HandOver:
    """The chunks of one request, handed over layer by layer ahead of their commit, in the pools that the engine has of each
    chunk. If the node has no room for all of them at once, those that fit are handed over; the others are saved later."""

    def __init__(self, memory: Memory, shape: Shape, counts: Counts, copying: threading.Lock) -> None:
        self._memory, self._shape, self._counts, self._copying = memory, shape, counts, copying
        self.node: Open | None = None
        # None while the node has no room.
        self._reservation: larder_kv.Reservation | None = None
        # Chunks of the save that are handed over, or that the node had, from the first on.
        self._end = 0
        # For each chunk to save: its blocks, by group.
        self._blocks: list[tuple[list[int], ...]] = []
        # The chunks to write, with their pools.
        self._written: list[tuple[int, list[int]]] = []

    def begin(self, node: Open, job: SaveJob) -> bool:
        """Takes room for the chunks that the node does not have; a later session cannot continue with this room."""
        self.node, self._blocks = node, blocks_of(job, self._shape)
        try:
            self._reservation, self._end = reserve(node, job, self._memory, self._blocks, job.chunks)
        except larder_kv.BusyError:
            return True
        self._written = list(zip(self._reservation.chunks, self._reservation.pools, strict=True))
        return True

    def give(self, node: Open, job: SaveJob, of: MemoryLayer) -> bool:
        """Hands a computed layer over; False if the request's blocks are about to be overwritten."""
        if self._reservation is None:
            return True
        assert self.node is not None
        job.gate.wait(of.number)
        chunks = [chunk for chunk, pools in self._written if of.pool in pools]
        at_once = max(_window_bytes(node.session) * of.pages.layers // (2 * of.pages.block_bytes), 1)
        parts = [chunks[start : start + at_once] for start in range(0, len(chunks), at_once)]
        pieces = [(part, [page for chunk in part for page in self._blocks[chunk][of.group]]) for part in parts]
        copy = partial(self._copy, job, of.pages)
        return hand_over_layer(self.node, self._reservation, pieces, of.layer, copy, of.pool, job.patience)

    def finish(self, node: Open, job: SaveJob) -> bool:
        """Commits the chunks that were handed over; False if the node does not keep them."""
        if self._written:
            assert self.node is not None and self._reservation is not None
            commit, written = self.node.session.commit_handed_over, [chunk for chunk, _ in self._written]
            if job.patience.ask(partial(commit, self._reservation, written)) < len(written):
                return False
            self._counts.add("handed_over_chunks", len(self._written))
            self._counts.add("saved_bytes", sum(self._memory.bytes_of_chunk(pools) for _, pools in self._written))
        job.saved = self._end
        return True

    def _copy(self, job: SaveJob, layers: Pages, staged: larder_kv.StagedLayers, pages: list[int]) -> bool:
        with self._copying:
            if not job.cancelled:
                layers.save_layers(staged, pages)
            return not job.cancelled


class Saver:
    """Saves blocks in the background: a step never waits for a save."""

    def __init__(self, node: Node, memory: Memory, shape: Shape, counts: Counts, queue_chunks: int) -> None:
        self._node, self._memory, self._shape, self._counts = node, memory, shape, counts
        self._queue_chunks = queue_chunks
        self._warned = False
        self._refusals: set[str] = set()
        self._lock = threading.Lock()
        self._copying = threading.Lock()
        self._jobs: list[SaveJob] = []
        self._ended: list[int] = []
        # Requests with an unsaved chunk: a lookup could not find the chunks after it.
        self._holed: set[str] = set()
        # Jobs of one step that are handed over are done together, since they wait for each layer.
        self._work: queue.SimpleQueue[list[SaveJob] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="larder-save", daemon=True)
        self._thread.start()

    def save_soon(self, saves: Sequence[Save], gate: LayerGate) -> None:
        """Accepts the saves of a step, or sheds them. Layers are read once `gate` lets them pass."""
        handed_over: list[SaveJob] = []
        for save in saves:
            job = SaveJob(save, gate)
            if reason := self._take(job):
                self._counts.add(reason, job.chunks)
                self._leave(save)
            elif save.attempt is None:
                self._work.put([job])
            else:
                handed_over.append(job)
        if handed_over:
            self._work.put(handed_over)

    def take_ended(self) -> list[int]:
        """The numbers of the saves that have ended since the last call, whatever their result: their blocks are no longer
        read."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def cancel(self, request: str) -> None:
        """Stops reading a request's blocks: they are about to be overwritten."""
        with self._lock:
            self._holed.discard(request)
            for job in self._jobs:
                job.cancelled |= job.save.request == request
        # Once the lock is free, a copy that had begun has ended.
        with self._copying:
            pass

    def is_reading(self, request: str) -> bool:
        """Whether blocks of the request are still to be read."""
        with self._lock:
            return any(job.save.request == request for job in self._jobs)

    def forget(self, request: str) -> None:
        """Forgets a request that is gone."""
        with self._lock:
            self._holed.discard(request)

    def close(self, seconds: float) -> None:
        """Ends the thread after its last task, or abandons it after `seconds`."""
        self._work.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (jobs := self._work.get()) is not None:
            if jobs[0].save.attempt is None:
                time.sleep(max(jobs[0].not_before - time.monotonic(), 0))
                self._end(jobs[0], self._save(jobs[0], self._write))
            else:
                self._hand_over(jobs)

    def _take(self, job: SaveJob) -> str | None:
        """Accepts a save, or returns the name of the counter of its shedding."""
        with self._lock:
            waiting = sum(other.chunks for other in self._jobs)
            if job.save.request in self._holed:
                return "shed_chunks_gone"
            if waiting > 0 and waiting + job.chunks > self._queue_chunks:
                self._holed.add(job.save.request)
                return "shed_chunks_queue"
            self._jobs.append(job)
            return None

    def _leave(self, save: Save) -> None:
        """Notes that the save's blocks are no longer read."""
        if save.number is not None:
            with self._lock:
                self._ended.append(save.number)

    def _end(self, job: SaveJob, reason: str | None) -> None:
        self._counts.add("saved_chunks", job.saved)
        if reason is not None:
            self._counts.add(reason, job.chunks - job.saved)
        self._leave(job.save)
        with self._lock:
            self._jobs.remove(job)
            if reason is not None and not job.cancelled:
                self._holed.add(job.save.request)

    def _hand_over(self, jobs: Sequence[SaveJob]) -> None:
        """Hands the chunks of several requests over, layer by layer as the step computes them."""
        begun: list[tuple[SaveJob, HandOver]] = []
        for job in jobs:
            hand_over = HandOver(self._memory, self._shape, self._counts, self._copying)
            reason = self._save(job, hand_over.begin)
            if reason is None:
                begun.append((job, hand_over))
            else:
                self._end(job, reason)
        for layer in self._memory.given:
            going = []
            for job, hand_over in begun:
                reason = self._save(job, partial(hand_over.give, of=layer), hand_over.node)
                if reason is None:
                    going.append((job, hand_over))
                else:
                    self._end(job, reason)
            begun = going
        left = []
        for job, hand_over in begun:
            reason = self._save(job, hand_over.finish, hand_over.node)
            if reason is None and job.saved < job.chunks:
                left.append((job, hand_over.node))
            else:
                self._end(job, reason)
        # When no hand-over holds room any more.
        for job, node in left:
            self._end(job, self._save(job, self._write, node))

    def _save(
        self, job: SaveJob, write: Callable[[Open, SaveJob], bool], begun: Open | None = None
    ) -> str | None:
        """Saves the chunks or a part of them, or returns the name of the counter of its failure. What was begun with a session is
        not continued with another."""
        node = self._node.current()
        if node is None or node is not (begun or node):
            return "shed_chunks_node"
        if job.cancelled or job.save.request in self._holed:
            return "shed_chunks_gone"
        try:
            done = write(node, job)
        except larder_kv.BusyError:
            return "shed_chunks_room"
        except larder_kv.WindowError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "nothing is saved: %s. Raise `window_bytes`, here and in the node's configuration for its tenant", error
                )
            return "shed_chunks_room"
        except larder_kv.RefusedError as error:
            self._refused(error)
            return "shed_chunks_refused"
        except larder_kv.LarderError as error:
            if isinstance(error, LOST):
                self._node.lost(node)
            return "shed_chunks_node"
        # Catches everything: without this thread nothing would be saved again.
        except BaseException:
            logger.exception("a save failed")
            return "shed_chunks_node"
        return None if done else "shed_chunks_gone"

    def _refused(self, error: larder_kv.RefusedError) -> None:
        """Logs each reason of a refusal once."""
        reason = str(error)
        if reason not in self._refusals and len(self._refusals) < MOST_REASONS:
            self._refusals.add(reason)
            logger.warning("chunks are not saved: %s", reason)

    def _write(self, node: Open, job: SaveJob) -> bool:
        """Writes the chunks that are not saved yet and that the node does not have; False if cancelled, or if not all are kept.
        Each part of them is committed before room is taken for the next: no save needs room for all its chunks at once."""
        blocks = blocks_of(job, self._shape)
        at_once = max(_window_bytes(node.session) // (2 * self._memory.chunk_bytes), 1)
        while job.saved < job.chunks:
            end = min(job.saved + RESERVED_PARTS * at_once, job.chunks)
            reservation, end = job.patience.ask(partial(reserve, node, job, self._memory, blocks, end))
            if not self._write_part(node, job, reservation, blocks[job.saved : end], at_once):
                return False
            job.saved = end
        return True

    def _write_part(
        self,
        node: Open,
        job: SaveJob,
        reservation: larder_kv.Reservation,
        blocks: Sequence[tuple[list[int], ...]],
        at_once: int,
    ) -> bool:
        """Writes the reserved chunks, `at_once` of them at a time; `blocks` are those of each chunk of the reservation's chain."""
        session, positions = node.session, reservation.chunks
        for start in range(0, len(positions), at_once):
            part = positions[start : start + at_once]
            staged = session.stage_chunks(reservation, part)
            # This session has one slice, so a block has the number of its pool.
            wanted = [chunk.blocks for chunk in staged]
            rows = [ChunkBlocks(chunk, blocks[chunk.position], there) for chunk, there in zip(staged, wanted, strict=True)]
            job.gate.wait_all()
            if not self._copy(job, rows):
                return False
            # The chunks stay staged while the node is busy.
            if job.patience.ask(partial(session.commit, reservation, staged)) < len(staged):
                return False
            self._counts.add("saved_bytes", sum(map(self._memory.bytes_of_chunk, wanted)))
        return True

    def _copy(self, job: SaveJob, chunks: Sequence[ChunkBlocks]) -> bool:
        with self._copying:
            if not job.cancelled:
                self._memory.save(chunks)
            return not job.cancelled


def reserve(
    node: Open, job: SaveJob, memory: Memory, blocks: Sequence[tuple[list[int], ...]], end: int
) -> tuple[larder_kv.Reservation, int]:
    """Reserves the chunks of a save that are not saved yet, up to `end`, or fewer if the node says that they are too many for one
    reservation. Returns the reservation and the end of its chunks."""
    save, first = job.save, job.saved
    chain = node.namespace.chain(save.hashes).part(save.first_chunk)
    while True:
        pools = [memory.pools_there(one) for one in blocks[first:end]] if save.others else None
        try:
            reservation = node.session.reserve(
                node.namespace,
                chain.part(first, end),
                priority=save.priority,
                attempt=attempt_to_write(save.attempt),
                pools=pools,
            )
            return reservation, end
        except larder_kv.RefusedError as error:
            if not is_too_large(error) or end - first == 1:
                raise
            end = first + (end - first) // 2


def blocks_of(job: SaveJob, shape: Shape) -> list[tuple[list[int], ...]]:
    """The blocks of each chunk of a save, by group."""
    save, pages = job.save, shape.pages_per_chunk
    first = [save.pages[at * pages : (at + 1) * pages] for at in range(job.chunks)]
    return [(own, *save.others[at]) if save.others else (own,) for at, own in enumerate(first)]


def _window_bytes(session: larder_kv.Session) -> int:
    """The most bytes that may be written at a time: those of the window, or those of a usual window for an engine that writes
    into the node's memory itself."""
    return session.window_bytes or Settings.window_bytes
