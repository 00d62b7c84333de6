"""The worker half against a real node, with stand-ins for the few names that it imports of vLLM and PyTorch."""

import importlib
from dataclasses import dataclass, field
from types import SimpleNamespace

import larder_kv
import pytest
from absent import absent_packages
from conftest import until
from larder_kv.vllm.memory import PoolMemory, done
from larder_kv.vllm.plan import Load, Save
from test_vllm_decisions import facts
from test_vllm_transfers import LAYERS, Rank, hashes


class DamagedPages:
    """Pages into which no chunk can be loaded."""

    def __init__(self, pages: larder_kv.PagedMemory):
        self._pages = pages

    def __getattr__(self, name: str) -> object:
        return getattr(self._pages, name)

    def load(self, *_: object, **more: object) -> None:
        error = larder_kv.DamagedError("the chunk is damaged")
        error.position = 0
        raise error


@pytest.fixture
def rank(cluster, request):
    made = Rank(cluster.sockets[0], request.node.name)
    yield made
    made.prefetcher.close()


@pytest.fixture
def worker(rank):
    """The worker half over the rank's threads."""
    with absent_packages("vllm", "torch"):
        half = importlib.import_module("larder_kv.vllm.worker").WorkerHalf
    settings = SimpleNamespace(device=0, load="sync")
    made = half(SimpleNamespace(settings=settings, has_micro_batches=False))
    made._layers, made._memory_layers = {str(layer): layer for layer in range(LAYERS)}, LAYERS
    made._device, made._node = SimpleNamespace(mark=lambda: done), rank.node
    made._loader, made._saver = rank.loader, rank.saver
    yield made
    made.close()


@dataclass
class KnownNode:
    """A link that notes what it opens."""

    namespace: larder_kv.NamespaceSpec
    begun: list[larder_kv.NamespaceSpec] = field(default_factory=list)

    def begin(self) -> None:
        self.begun.append(self.namespace)

    def wait_for_first_try(self, _seconds: float) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_rank_uses_the_names_that_its_scheduler_read(worker):
    own = facts(kv_dtype="fp8_ds_mla", details={"quantization": "changed by the model"}).namespace()
    scheduler = facts(kv_dtype="fp8").namespace()
    worker._node = node = KnownNode(own)
    worker.engine.settings.reconnect_seconds = 0
    plan = SimpleNamespace(actor=None, namespace=scheduler, preempted=[], saves=[])
    worker.begin_step(plan)
    assert node.begun == [], "the scheduler has not reached the node yet"
    for actor, sessions in ((3, 1), (3, 1), (0, 2)):
        plan.actor = actor
        worker.begin_step(plan)
        assert node.begun == [scheduler] * sessions and worker._actor.number == actor


def test_a_rank_keeps_its_own_sizes(worker):
    own, scheduler = facts(page_bytes=2_000).namespace(), facts().namespace()
    worker._node = node = KnownNode(own)
    worker.engine.settings.reconnect_seconds = 0
    worker.begin_step(SimpleNamespace(actor=0, namespace=scheduler, preempted=[]))
    assert node.begun == [own]


def compute(worker, plan) -> None:
    for layer in range(LAYERS):
        worker.wait_for_layer(str(layer))
        worker.layer_computed(str(layer), plan)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_layers_that_were_computed_from_a_damaged_chunk_are_never_committed(rank, worker, is_damaged):
    rank.save("a", 1)
    if is_damaged:
        (pool,) = rank.memory._pools
        rank.memory._pools = [PoolMemory(DamagedPages(pool.pages), pool.groups)]
    # A prefill for another engine: its first chunk is loaded, its second one is computed and handed over.
    load, save = Load("b", hashes(1), 0, [5, 6]), Save("b", hashes(2), 1, [7, 8], attempt=1)
    plan = SimpleNamespace(step=1, recovered=-1, loads=[load], saves=[save])
    worker.start_loads(plan)
    compute(worker, plan)
    # The engine's thread may take long from the last layer to the end of the step.
    until(lambda: not rank.saver.is_reading("b"))
    worker.end_step(plan)
    prefetch = rank.prefetcher.start("c", hashes(2), 1_000, False)
    assert rank.prefetcher.look(prefetch, 10) == (1 if is_damaged else 2)
    assert worker.failed_blocks() == ({5, 6} if is_damaged else set())


def test_layers_are_handed_over_once_every_micro_batch_has_computed_them(rank, worker):
    worker.engine.has_micro_batches = True
    plan = SimpleNamespace(step=1, recovered=-1, loads=[], saves=[Save("a", hashes(1), 0, [7, 8], attempt=1)])
    compute(worker, plan)
    # The second micro-batch may take long, and computes these blocks.
    until(lambda: not rank.saver.is_reading("a"))
    rank.fill(7, 70)
    rank.fill(8, 80)
    compute(worker, plan)
    worker.end_step(plan)
    until(lambda: not rank.saver.is_reading("a"))
    rank.loader.load_soon([Load("b", hashes(1), 0, [5, 6])])
    until(lambda: rank.loader.take_done() == {"b"})
    assert [rank.values(page) for page in (5, 6)] == [[70, 71, 72], [80, 81, 82]]


def test_a_pipeline_stage_whose_steps_vllm_does_not_end_saves_with_its_next_step(rank, worker):
    def begin(step: int, saves: list[Save], preempted: list[str]) -> None:
        plan = SimpleNamespace(step=step, recovered=-1, actor=None, loads=[], saves=saves)
        plan.preempted, plan.finished, plan.is_idle = preempted, [], not saves
        worker.begin_step(plan)
        worker.start_loads(plan)
        worker.finished(plan)

    ended = []

    def take_ended() -> list[int]:
        told = worker.ended_saves()
        ended.extend(told.ranks if told else [])
        return sorted(ended)

    begin(1, [Save("a", hashes(1), 0, [7, 8], number=1)], [])
    assert take_ended() == []
    begin(2, [Save("b", hashes(2), 1, [9, 10], number=2)], [])
    until(lambda: take_ended() == [1])
    assert rank.counts.take()["saved_chunks"] == 1
    # The last step's request is preempted: its save ends too.
    begin(3, [], ["b"])
    until(lambda: take_ended() == [1, 2])
