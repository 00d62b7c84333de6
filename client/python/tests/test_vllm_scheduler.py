"""The scheduler half against a real node, with stand-ins for the few names that it imports of vLLM."""

import importlib
from collections import Counter
from types import SimpleNamespace
from typing import Any

import larder_kv
import pytest
from absent import absent_packages
from conftest import Cluster, spec, start_cluster, until
from larder_kv.vllm.node import Node
from larder_kv.vllm.plan import Save, Shape
from larder_kv.vllm.published import Stored
from larder_kv.vllm.ranks import Ranks
from larder_kv.vllm.settings import Settings
from larder_kv.vllm.transfer import LayerGate
from test_vllm_transfers import LAYERS, PAGE_BYTES, SHAPE, Rank


@pytest.fixture
def scheduler_half():
    """The class of the scheduler half."""
    with absent_packages("vllm"):
        yield importlib.import_module("larder_kv.vllm.scheduler").SchedulerHalf


class Request(SimpleNamespace):
    """A request of vLLM with a prompt of so many chunks, and one token more."""

    def __init__(self, name: str, chunks: int, **params: object):
        hashes = [bytes([number // 2 + 1, number % 2]) * 16 for number in range(2 * chunks)]
        super().__init__(
            request_id=name,
            block_hashes=hashes,
            num_tokens=chunks * SHAPE.chunk_tokens + 1,
            num_computed_tokens=0,
            num_preemptions=0,
            skip_reading_prefix_cache=False,
            kv_transfer_params=params or None,
            lora_request=None,
        )


class Scheduled:
    """A scheduler half, one rank, and the part of vLLM's scheduler that calls them."""

    def __init__(self, half: type, socket: str, model: str, **settings: Any):
        self.rank = Rank(socket, model)
        settings = Settings(socket=socket, describe=True, **settings)
        same = spec(model, hash_algorithm="sha256_cbor", hash_seed="test", pools=pools())
        engine = SimpleNamespace(
            shape=SHAPE,
            settings=settings,
            ranks=Ranks(),
            open_node=lambda slices, window_bytes, counts, actor: Node(
                lambda: actor.open(lambda device: settings.open_session("test", 0, device)), same, [0], 0.01
            ),
        )
        self.half = half(engine, True, True)
        self.half.bind(SimpleNamespace(blocks=[], touch=list, free_blocks=list))
        self.salt = "alice"
        # vLLM's own function computes the extra keys.
        importlib.import_module("larder_kv.vllm.scheduler").chunk_of = self.described

    def described(self, request: Request, shape: Shape, chunk: int) -> Stored:
        names = request.block_hashes[2 * chunk : 2 * chunk + 2]
        parent = request.block_hashes[2 * chunk - 1] if chunk else None
        return Stored(names, parent, 16, range(32), extra_keys=[(self.salt,), None])

    def comes(self, request: Request) -> int:
        """A request comes; returns the number of its tokens that are found."""
        self.half.on_new_request(request)
        return self.found(request)

    def found(self, request: Request) -> int:
        found: list[int] = []
        until(lambda: found.append(self.half.matched_tokens(request, 0)[0]) or found[-1] is not None)
        return found[-1]

    def load(self, request: Request, tokens: int) -> None:
        """vLLM allocates blocks for a load."""
        self.half.update_after_alloc(request, ([8, 9, 10, 11],), tokens)

    def step(self, computed: Request | None = None, preempted: tuple[str, ...] = ()):
        """The plan of a step, which computes a whole prompt, or nothing."""
        scheduled = {computed.request_id: computed.num_tokens} if computed else {}
        plan = self.half.plan_step(
            SimpleNamespace(
                preempted_req_ids=set(preempted),
                total_num_scheduled_tokens=sum(scheduled.values()),
                num_scheduled_tokens=scheduled,
                kv_connector_block_state=SimpleNamespace(get_block_ids=lambda _: ([0, 1, 2, 3],)),
            )
        )
        if computed:
            computed.num_computed_tokens = computed.num_tokens
        return plan

    def save(self, saves: list[Save]) -> None:
        gate = LayerGate(LAYERS)
        gate.open_all()
        self.rank.saver.save_soon(saves, gate)
        until(lambda: not any(self.rank.saver.is_reading(save.request) for save in saves))

    def hears(
        self,
        received: tuple[str, ...] = (),
        failed: tuple[str, ...] = (),
        blocks: tuple[int, ...] = (),
        saved: tuple[int, ...] = (),
    ) -> None:
        ended = importlib.import_module("larder_kv.vllm.messages").SavesEnded(Counter(saved))
        self.half.update_output(
            SimpleNamespace(
                kv_connector_worker_meta=ended,
                finished_recving=set(received),
                failed_recving=set(failed),
                invalid_block_ids=set(blocks),
            )
        )

    def close(self) -> None:
        self.half.close()
        self.rank.close()


def pools():
    return [larder_kv.Pool(layers=LAYERS, layer_bytes=2 * PAGE_BYTES)]


@pytest.fixture
def scheduled(scheduler_half, cluster, request):
    made = Scheduled(scheduler_half, cluster.sockets[0], request.node.name)
    yield made
    made.close()


def test_a_saved_prompt_is_found_by_the_next_request(scheduled):
    first = Request("a", 2)
    assert scheduled.comes(first) == 0
    (save,) = scheduled.step(first).saves
    scheduled.save([save])
    assert scheduled.comes(Request("b", 2)) == 2 * SHAPE.chunk_tokens


def test_every_token_of_a_hit_has_a_source(scheduled):
    first, second = Request("a", 2), Request("b", 2)
    scheduled.comes(first)
    scheduled.save(scheduled.step(first).saves)
    tokens = scheduled.comes(second)
    prefetch = scheduled.half._prefetcher.find("b")
    scheduled.load(second, tokens)
    for spans, sources in (
        ([(0, 1, "device"), (1, 2, "host")], {"HOST": 64}),
        # A lookup names no tier for chunks of a hybrid model that other nodes have.
        ([(0, 1, "disk")], {"DISK": 32, "P2P": 32}),
        ([], {"P2P": 64}),
    ):
        prefetch.spans = spans
        assert scheduled.half.hit_sources(second, tokens) == sources


def test_an_engine_steps_until_it_has_heard_of_the_end_of_its_copies(scheduled):
    """Only then it pauses: a sleeping engine unmaps the memory from which saves read, and into which loads write."""
    request = Request("a", 2)
    scheduled.comes(request)
    assert not scheduled.half.is_copying()
    (save,) = scheduled.step(request).saves
    assert scheduled.half.is_copying() and not scheduled.half.is_holding_blocks(), "its blocks are the request's own"
    scheduled.save([save])
    scheduled.step()
    scheduled.hears(saved=tuple(scheduled.rank.saver.take_ended()))
    assert not scheduled.half.is_copying()
    again = Request("b", 2)
    tokens = scheduled.comes(again)
    scheduled.load(again, tokens)
    scheduled.step()
    assert tokens == 64 and scheduled.half.is_copying()
    scheduled.hears(received=("b",))
    assert not scheduled.half.is_copying()


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_decode": True, "remote_attempt": "abc"},
        {"do_remote_prefill": True, "remote_node": "node-0", "remote_device": [1]},
        {"do_remote_prefill": True, "remote_node": "node-0" * 1_000_000},
        {"larder_hints": [1]},
    ],
)
def test_wrong_parameters_are_no_errors(scheduled, params):
    request, node = Request("a", 2, **params), scheduled.half._node.current()
    assert scheduled.comes(request) == 0
    scheduled.step(request)
    scheduled.half.end(request)
    assert scheduled.comes(Request("b", 2)) == 0 and scheduled.half._node.current() is node


def test_a_prompt_that_cannot_be_described_is_served_and_the_next_one_is_described(scheduled, caplog):
    scheduled.salt = "a" * 100_000
    for name in ("a", "b"):
        request = Request(name, 2)
        scheduled.comes(request)
        scheduled.save(scheduled.step(request).saves)
    assert scheduled.comes(Request("c", 2)) == 2 * SHAPE.chunk_tokens
    assert caplog.text.count("tokens are not passed on") == 1 and not scheduled.half._describer._said
    scheduled.salt = "alice"
    scheduled.comes(Request("d", 2))
    assert len(scheduled.half._describer._said) == 2


def test_after_a_reset_nothing_is_found_that_was_computed_before(scheduled):
    """vLLM resets its caches when the weights have changed."""
    old = Request("old", 2)
    scheduled.comes(old)
    scheduled.save(scheduled.step(old).saves)
    running, waiting = Request("running", 2), Request("waiting", 2)
    assert scheduled.comes(waiting) == 2 * SHAPE.chunk_tokens
    scheduled.half.on_new_request(running)
    running.num_computed_tokens = 16

    assert scheduled.half.reset() is True
    assert scheduled.found(waiting) == 0
    assert scheduled.step(running).saves == [], "its first tokens are of the old weights"
    (save,) = scheduled.step(waiting).saves
    scheduled.save([save])
    assert scheduled.comes(Request("new", 2)) == 2 * SHAPE.chunk_tokens
    running.num_computed_tokens, running.num_preemptions = 0, 1
    assert scheduled.found(running) == 2 * SHAPE.chunk_tokens
    scheduled.half.reset()
    assert scheduled.comes(Request("newer", 2)) == 0


def test_after_a_reset_a_request_whose_load_it_preempted_finds_nothing(scheduler_half, cluster, request):
    scheduled = Scheduled(scheduler_half, cluster.sockets[0], request.node.name, load="sync")
    first = Request("a", 2)
    scheduled.comes(first)
    scheduled.save(scheduled.step(first).saves)
    second = Request("b", 2)
    scheduled.load(second, scheduled.comes(second))
    scheduled.step(second)
    # `reset_running_requests` preempts it before the next step.
    second.num_computed_tokens, second.num_preemptions = 0, 1
    scheduled.half.reset()
    assert scheduled.found(second) == 0
    scheduled.close()


def test_after_a_reset_nothing_is_handed_over_to_engines_that_know_other_names(scheduled):
    scheduled.half.reset()
    prefill = Request("a", 2, do_remote_decode=True)
    scheduled.comes(prefill)
    scheduled.step(prefill)
    assert scheduled.half.end(prefill)[1] is None
    decode = Request("b", 2, do_remote_prefill=True, remote_node="node-0")
    scheduled.half.on_new_request(decode)
    assert scheduled.half._prefetcher.find("b").writer is None, "it would wait for a name that never comes"


def test_a_request_that_is_preempted_and_resumed_in_one_step_keeps_its_new_load(scheduled):
    first = Request("a", 2)
    scheduled.comes(first)
    scheduled.save(scheduled.step(first).saves)
    second = Request("b", 2)
    tokens = scheduled.comes(second)
    scheduled.load(second, tokens)
    plan = scheduled.step(preempted=("b",))
    assert [load.request for load in plan.loads] == ["b"]
    assert scheduled.half._prefetcher.find("b").lease is not None, "until the ranks have their own"
    scheduled.hears(blocks=(9,))
    scheduled.hears(received=("b",))
    assert scheduled.half.matched_tokens(second, 0) == (0, False), "another load would fail too"
    assert scheduled.half._prefetcher.find("b") is None


def saved_and_loading(scheduled):
    """A request whose chunks are saved, and one whose chunks are being loaded."""
    first, second = Request("a", 2), Request("b", 2)
    scheduled.comes(first)
    scheduled.save(scheduled.step(first).saves)
    scheduled.load(second, scheduled.comes(second))
    scheduled.step()
    return first, second


def test_a_failed_load_of_a_request_that_has_ended_says_nothing_about_the_next_of_its_name(scheduled):
    _, second = saved_and_loading(scheduled)
    assert scheduled.half.finished(second) is False
    scheduled.hears(received=("b",), failed=("b",))
    assert scheduled.comes(Request("b", 2)) == 2 * SHAPE.chunk_tokens


def test_a_failed_load_leaves_the_saves_of_other_requests_alone(scheduled):
    first, second = saved_and_loading(scheduled)
    scheduled.hears(received=("b",), blocks=(9,))
    assert scheduled.step(first).saves == [], "its chunks are saved"
    (again,) = scheduled.step(second).saves
    assert (again.request, again.first_chunk) == ("b", 0)


def test_names_with_a_salt_differ_in_every_chunk_and_stay_the_same():
    hashes = Request("a", 3).block_hashes
    plain, one, other = (
        Shape(SHAPE.chunk_tokens, SHAPE.block_tokens, salt=salt).chunk_hashes(hashes) for salt in (b"", b"a", b"b")
    )
    assert max(Counter(plain + one + other).values()) == 1 and {len(name) for name in one} == {32}
    assert Shape(SHAPE.chunk_tokens, SHAPE.block_tokens, salt=b"a").chunk_hashes(hashes) == one


def test_requests_that_wait_while_their_node_restarts_hit_what_the_new_one_has(scheduler_half, tmp_path):
    """A request whose prefetch had ended is not told of chunks that went with the old node."""

    def start() -> Cluster:
        return start_cluster("--nodes", "1", "--arena-bytes", "16MiB", "--dir", str(tmp_path))

    def save_prompt(scheduled: Scheduled) -> None:
        until(lambda: scheduled.half._node.current() is not None and scheduled.rank.node.current() is not None)
        request = Request("first", 2)
        scheduled.comes(request)
        scheduled.save(scheduled.step(request).saves)
        scheduled.half.finished(request)

    own = start()
    scheduled = Scheduled(scheduler_half, own.sockets[0], "restart")
    save_prompt(scheduled)
    waiting = Request("b", 2)
    assert scheduled.comes(waiting) == 2 * SHAPE.chunk_tokens
    own.stop()
    until(lambda: scheduled.half._node.current() is None)
    assert scheduled.found(waiting) == 0, "its chunks are gone"
    own = start()
    save_prompt(scheduled)
    assert scheduled.found(waiting) == 2 * SHAPE.chunk_tokens, "it is asked for again"
    scheduled.close()
    own.stop()


def test_a_part_that_fails_to_close_leaves_no_other_part_open(scheduler_half, cluster):
    scheduled = Scheduled(scheduler_half, cluster.sockets[0], "close")

    def fail() -> None:
        raise RuntimeError("a bug")

    scheduled.half._keeper.close = fail
    with pytest.raises(RuntimeError):
        scheduled.half.close()
    assert scheduled.half._node.current() is None and scheduled.half._prefetcher._handoffs._shutdown
    scheduled.rank.close()
