"""Scenarios with real engines: a prompt has the same answer with Larder as without.

suite.py [NAME...]     all scenarios, or the named ones
"""

import statistics
import subprocess
import sys
from pathlib import Path

import adapters as lora
import crowd as many
import first_hour as hour
import fixed_cost as fixed
import hinted
import hybrid
import kubernetes_manifests as manifests
import kv_groups
import memory as soaked
import on_gpu
import packed
import parallel
import prefill_decode as prefill_and_decode
import prefill_decode_router as behind_router
import router_events as routers
import secondary_tier as tier
import several_devices as several
import speculating
from answers import computed, counted, hit_of, loaded, prompt, same
from driver import BLOCK_TOKENS, HERE, Cluster, Engine
from router_suite import conversations
from scenarios import ROWS, Scenarios, row, until

scenario = Scenarios()


class World:
    """The common parts of all scenarios: a folder, and the answers of an engine without Larder."""

    def __init__(self, scratch: Path):
        subprocess.run([sys.executable, HERE / "model.py", scratch / "model"], check=True)
        self.scratch = scratch
        self.seeds = range(1, 25)
        with Engine(scratch, "reference") as engine:
            # The first prompt includes one-time compilation and allocation.
            engine.ask(prompt(99))
            self.reference = {seed: engine.ask(prompt(seed)) for seed in self.seeds}
            # A prompt that continues the first one, for a load that fails in the step that computes the continuation.
            self.longer = prompt(1) + prompt(50)[:100]
            self.longer_reference = engine.ask(self.longer)
            self.crowd = [prompt(60 + n) for n in range(4)]
            self.crowd_reference = [engine.ask(one, max_tokens=64) for one in self.crowd]
            self.long = [prompt(100 + n, 3_000) for n in range(5)]
            self.long_cold = [engine.ask(one, max_tokens=8) for one in self.long]
            # With its own cache the engine computes in the same pieces as an engine that loads, and so the same result to the
            # last bit.
            self.long_reference = [engine.ask(one, max_tokens=8) for one in self.long]
        self.used = iter(self.seeds[1:])

    def cluster(self, name: str, nodes: int, arena: str = "256MiB", log: str = "info") -> Cluster:
        folder = self.scratch / name
        folder.mkdir(exist_ok=True)
        return Cluster(folder, nodes, arena, log)

    def fresh(self) -> tuple[list[int], dict]:
        """A prompt that no engine has seen, and its answer without Larder."""
        seed = next(self.used)
        return prompt(seed), self.reference[seed]


@scenario
def two_nodes(world: World) -> None:
    """A prefix that one engine computed is loaded by an engine on another node; altered bytes are a miss."""
    cluster = world.cluster("two", 2)
    tokens, expected = world.fresh()
    altered, altered_expected = world.fresh()
    with Engine(world.scratch, "first", {"socket": cluster.sockets[0]}) as first:
        answer = first.ask(tokens)
        same(answer, expected)
        assert (loaded(answer), computed(answer)) == (0, 200)
        same(first.ask(altered), altered_expected)
        for long, long_expected in zip(world.long, world.long_cold, strict=True):
            same(first.ask(long, max_tokens=8), long_expected)
        salted = first.ask(*[tokens], **{"with": {"cache_salt": "alice"}})
        assert loaded(salted) == 0, "a salted prompt hit one without salt"
        until(lambda: cluster.metric(0, "larder_cached_chunks", tier="host") >= 5 * 93, "chunks are saved")
        for load in ("async", "sync"):
            with Engine(world.scratch, f"second-{load}", {"socket": cluster.sockets[1], "load": load}) as second:
                before = cluster.metric(1, "larder_peer_received_bytes_total")
                answer = second.ask(tokens)
                same(answer, expected)
                assert (loaded(answer), computed(answer)) == (192, 8), f"{answer['counts']}"
                came = cluster.metric(1, "larder_peer_received_bytes_total") - before
                how = f"over QUIC: {came:.0f} bytes" if came else "from its own node"
                row(f"200-token prompt, {load} load", f"192 loaded ({how}), 8 computed, identical")
                if load == "async":
                    assert came >= 6 * 65_536, "the blocks did not come from the other node"
                    salts(second, tokens)
                    ttft(world, second)
    wrong_bytes(world, cluster, altered, altered_expected)
    cluster.stop()


def salts(engine: Engine, tokens: list[int]) -> None:
    found = {}
    for salt in ("bob", "alice"):
        found[salt] = loaded(engine.ask(tokens, forget=True, **{"with": {"cache_salt": salt}}))
    assert found == {"bob": 0, "alice": 192}, f"{found}"
    row("the same prompt with salts", "another salt: 0 loaded; its own: 192 loaded")


def ttft(world: World, engine: Engine) -> None:
    """The time to the first token of a long prompt: loaded from the other node, then from the own node, compared with
    computed."""

    def ask(forget: bool) -> float:
        answers = [engine.ask(one, max_tokens=8, forget=forget) for one in world.long]
        for answer, expected in zip(answers, world.long_reference, strict=True):
            same(answer, expected)
            assert loaded(answer) == 2_976, f"{answer['counts']}"
        return first_token(answers)

    cold, far, near = first_token(world.long_cold), ask(forget=False), ask(forget=True)
    row(
        "first token of a 3,000-token prompt",
        f"computed {cold:.3f} s; loaded from the other node {far:.3f} s, {far / cold:.2f} of that; "
        f"from its own {near:.3f} s, {near / cold:.2f} of that",
    )


def first_token(answers: list[dict]) -> float:
    return statistics.median(answer["first_token_seconds"][0] for answer in answers)


def wrong_bytes(world: World, cluster: Cluster, tokens: list[int], expected: dict) -> None:
    """Alters every block on node 0. An engine on that node, which reads its host's memory unverified, shows that the output
    depends on the loaded bytes. Another node notices the damage, and then node 0 drops the damaged chunks."""
    cluster.flip_a_bit_in_every_page(0)
    # Otherwise one block in 64 would be verified, and computed again.
    with Engine(world.scratch, "control", {"socket": cluster.sockets[0], "verify": "off"}) as engine:
        answer = engine.ask(tokens)
        assert loaded(answer) == 192, f"{answer['counts']}"
        assert answer["logprobs"] != expected["logprobs"], "the output does not depend on what is loaded"
        row(
            "control: altered bytes on the engine's own host",
            "loaded, and the output differs: it depends on what is loaded",
        )
    with Engine(world.scratch, "altered", {"socket": cluster.sockets[1]}) as engine:
        answer = engine.ask(tokens)
        same(answer, expected)
        assert (loaded(answer), computed(answer)) == (0, 200), f"{answer['counts']}"
        found = cluster.metric(1, "larder_peer_fetches_total", outcome="checksum")
        assert found > 0, "the wrong bytes were not noticed"
        row("stored bytes altered behind its back", f"a miss ({found:.0f} checksums differed), identical")


@scenario
def two_ranks(world: World) -> None:
    """Engines of two ranks: each rank has a slice of every chunk."""
    cluster = world.cluster("ranks", 2)
    tokens = prompt(1)
    ranks = {"tensor_parallel_size": 2}
    with Engine(world.scratch, "ranks-reference", **ranks) as alone:
        expected = alone.ask(tokens)
    with Engine(world.scratch, "ranks-first", {"socket": cluster.sockets[0]}, **ranks) as first:
        same(first.ask(tokens), expected)
        until(lambda: cluster.metric(0, "larder_cached_chunks", tier="host") >= 6, "chunks are saved")
        with Engine(world.scratch, "ranks-second", {"socket": cluster.sockets[1]}, **ranks) as second:
            answer = second.ask(tokens)
            same(answer, expected)
            assert (loaded(answer), computed(answer)) == (192, 8), f"{answer['counts']}"
            assert counted(answer, "loaded_blocks") == 12, "each rank loads six blocks"
            row("tensor parallelism of 2", "192 loaded over QUIC by both ranks, 8 computed, identical")
    cluster.stop()


@scenario
def several_devices(world: World) -> None:
    """Engines beside a node with several GPUs."""
    several.run(world, row)


@scenario
def parallelism(world: World) -> None:
    """Pipeline and context parallelism, latent attention with an indexer, MTP."""
    parallel.run(world, row)


@scenario
def failures(world: World) -> None:
    """Blocks that do not come, a node that is killed, a node that comes late: recomputed, identical, counted."""
    cluster = world.cluster("failing", 2)
    tokens, expected = prompt(1), world.reference[1]
    killed, killed_expected = world.fresh()
    later, later_expected = world.fresh()
    with Engine(world.scratch, "saver", {"socket": cluster.sockets[0]}) as saver:
        same(saver.ask(tokens), expected)
        same(saver.ask(killed), killed_expected)
        until(lambda: cluster.metric(0, "larder_cached_chunks", tier="host") >= 12, "chunks are saved")
    for load in ("async", "sync"):
        connector = {"socket": cluster.sockets[0], "load": load}
        with Engine(world.scratch, f"lossy-{load}", connector, faults={"lose_chunks_from": 3}) as lossy:
            if load == "sync":
                computed_from_garbage(world, lossy)
            answer = lossy.ask(tokens, forget=True)
            same(answer, expected)
            assert counted(answer, "failed_blocks") == 3, f"{answer['counts']}"
            row(f"3 of 6 blocks do not come, {load} load", "3 counted, recomputed, identical")
    with Engine(world.scratch, "luckless", {"socket": cluster.sockets[0]}, faults={"lose_chunks_from": 0}) as luckless:
        answer = luckless.ask(tokens)
        same(answer, expected)
        assert (counted(answer, "loads"), counted(answer, "failed_blocks")) == (1, 6), f"{answer['counts']}"
        row("no block comes, async load", "6 counted, not tried again, recomputed, identical")
    with Engine(world.scratch, "clean", {"socket": cluster.sockets[0]}) as clean:
        answer = clean.ask(world.longer)
        same(answer, world.longer_reference)
        assert loaded(answer) == 288, f"{answer['counts']}"
        row("what was saved after a failed load", "288 tokens loaded by another engine, identical")
    victim = cluster.pid(0)
    with Engine(world.scratch, "orphan", {"socket": cluster.sockets[0]}, faults={"kill_before_load": victim}) as orphan:
        answer = orphan.ask(killed)
        same(answer, killed_expected)
        assert counted(answer, "failed_blocks") == 6, f"{answer['counts']}"
        row("node killed during a load", "6 blocks counted, recomputed, identical")
        # The node is started again, and used again.
        until(lambda: cluster.pid(0) != victim, "the node starts again")
        same(orphan.ask(later), later_expected)
        answer = until(lambda: hit_of(orphan, later, later_expected), "the node is used again", patience=120)
        row("the node comes back", f"{loaded(answer)} tokens loaded from it, identical")
    cluster.stop()


def computed_from_garbage(world: World, lossy: Engine) -> None:
    """The step that computes the tokens after the prefix begins with blocks that did not come: its results must not be saved.
    Another engine shows later that the chunks saved in their place are right."""
    answer = lossy.ask(world.longer)
    same(answer, world.longer_reference)
    assert counted(answer, "shed_chunks_gone") == 3, f"{answer['counts']}"
    until(lambda: counted_now(lossy, prompt(99), "saved_chunks") >= 9, "what was computed again is saved")


@scenario
def absent_then_full(world: World) -> None:
    """A node that is absent at the start; an arena that is full."""
    folder = world.scratch / "late"
    tokens, expected = world.fresh()
    full, full_expected = world.fresh()
    with Engine(world.scratch, "early", {"socket": str(folder / "node-0.sock")}) as engine:
        answer = engine.ask(tokens)
        same(answer, expected)
        assert counted(answer, "lookups_without_node") == 1, f"{answer['counts']}"
        row(
            "node absent at the start",
            f"identical, {counted(answer, 'lookups_without_node')} lookup without it counted",
        )
        cluster = world.cluster("late", 1, arena="4MiB")
        until(lambda: hit_of(engine, tokens, expected), "the node is used", patience=120)
        row("the node comes later", "192 tokens loaded from it, identical")
        held = take_everything(cluster)
        answer = engine.ask(full)
        same(answer, full_expected)
        shed = until(lambda: counted_now(engine, full, "shed_chunks_room"), "the lack of room is counted")
        row("arena full", f"identical, {shed} chunks counted that were not saved")
        assert held
    cluster.stop()


def counted_now(engine: Engine, tokens: list[int], name: str) -> int:
    """A counter: the engine reports its counts with its steps."""
    return int(engine.ask(tokens)["totals"].get(f"larder_{name}", 0))


def take_everything(cluster: Cluster) -> list:
    """Takes all of a node's memory: chunks that are reserved and not committed cannot be evicted. One session may reserve only a
    part."""
    import larder_kv

    pool = larder_kv.Pool(layers=1, layer_bytes=1 << 20)
    spec = larder_kv.NamespaceSpec(model="filler", kv_dtype="x", layout="x", chunk_tokens=16, pools=[pool])
    taken = []
    for _ in range(16):
        session = larder_kv.Session(cluster.sockets[0], window_bytes=0)
        namespace = session.register(spec)
        try:
            while True:
                taken.append(session.reserve(namespace, namespace.chain_of_tokens([len(taken)] * 16)))
        except larder_kv.BusyError as busy:
            if busy.what == "memory":
                return taken
    raise AssertionError("the node was never full")


@scenario
def crowd(world: World) -> None:
    """64 requests at once: clients hang up, a node and an engine are killed."""
    many.run(world, row)


@scenario
def memory(world: World) -> None:
    """The memory of an engine and a node in the long run."""
    soaked.run(world, row)


@scenario
def preemption(world: World) -> None:
    """More requests than the engine has blocks for: they are preempted, and the chunks that they saved are right."""
    cluster = world.cluster("preempted", 1)
    with Engine(
        world.scratch, "crowded", {"socket": cluster.sockets[0]}, num_gpu_blocks_override=27, max_model_len=512
    ) as crowded:
        answer = crowded.ask(*world.crowd, max_tokens=64)
        assert answer["finish"] == ["length"] * 4
        preempted = int(answer["totals"]["num_preemptions"])
        assert preempted > 0, "nothing was preempted"
    with Engine(world.scratch, "after", {"socket": cluster.sockets[0]}) as after:
        for tokens, expected in zip(world.crowd, world.crowd_reference, strict=True):
            answer = after.ask(tokens, max_tokens=64)
            # Prompts that were computed together differ in the last bits from prompts computed alone.
            assert answer["tokens"][0][:8] == expected["tokens"][0][:8], "other tokens than without Larder"
            assert loaded(answer) == 192
        row("4 requests, blocks for 3", f"{preempted} preempted; what they saved gives the same tokens")
    cluster.stop()


@scenario
def other_namespaces(world: World) -> None:
    """Another data type, another block size: clean misses."""
    cluster = world.cluster("namespaces", 1)
    tokens, expected = world.fresh()
    with Engine(world.scratch, "origin", {"socket": cluster.sockets[0]}) as origin:
        same(origin.ask(tokens), expected)
        until(lambda: cluster.metric(0, "larder_cached_chunks", tier="host") >= 6, "chunks are saved")
    for what, options, connector in (
        ("float32", {"dtype": "float32"}, {}),
        ("blocks of 64 tokens", {"block_size": 64}, {"chunk_tokens": 64}),
    ):
        with Engine(
            world.scratch, what.replace(" ", "-"), {"socket": cluster.sockets[0]} | connector, **options
        ) as other:
            answer = other.ask(tokens)
            assert loaded(answer) == 0 and counted(answer, "lookups") == 1, f"{answer['counts']}"
            assert counted(answer, "failed_blocks") == counted(answer, "lookups_failed") == 0
            row(f"{what} instead", "a clean miss")
    cluster.stop()


@scenario
def packed_pages(world: World) -> None:
    """Hosts whose CPUs pack pages in different orders, and GPUs."""
    packed.run(world, row)


@scenario
def overhead(world: World) -> None:
    """The share of a step that the engine's own thread spends in the connector, if nothing hits."""
    cluster = world.cluster("overhead", 1)
    with Engine(world.scratch, "timed", {"socket": cluster.sockets[0]}, faults={}) as engine:
        engine.ask(prompt(99))
        before = engine.ask(prompt(98))
        answers = [engine.ask(prompt(200 + n, 3_000), max_tokens=16) for n in range(4)]
        assert all(loaded(answer) == 0 for answer in answers)
        spent = answers[-1]["connector_seconds"] - before["connector_seconds"]
        whole = sum(answer["seconds"] for answer in answers)
        row("connector on a miss", f"{100 * spent / whole:.2f} % of the engine's time, saves included")
        short = [engine.ask(prompt(300 + n, BLOCK_TOKENS)) for n in range(2)]
        assert [counted(answer, "short_prompts") for answer in short] == [1, 1], f"{short[0]['counts']}"
        assert engine.log.read_text().count("is too short for a hit") == 1, "it is explained once"
        row("prompts of one chunk", "counted, and explained once")
    cluster.stop()


@scenario
def fixed_cost(world: World) -> None:
    """The first token of a hit and of a miss, compared with vLLM's own."""
    fixed.run(world, row, until)


@scenario
def first_hour(world: World) -> None:
    """The commands of the book's first hour with vLLM."""
    hour.run(world, row)


@scenario
def hints(world: World) -> None:
    """Pins of sessions, by the hints of requests."""
    hinted.run(world, row)


@scenario
def adapters(world: World) -> None:
    """LoRA adapters never share prompts with others."""
    lora.run(world)


@scenario
def kv_cache_groups(world: World) -> None:
    """Compares the blocks that are saved and loaded with vLLM's own manager of blocks."""
    kv_groups.run(row)


@scenario
def speculative_decoding(world: World) -> None:
    """Drafts without KV, by a model of their own, and by EAGLE."""
    speculating.run(world, row)


@scenario
def sliding_windows(world: World) -> None:
    """A model with full attention and sliding windows."""
    hybrid.windows(world)


@scenario
def recurrent_state(world: World) -> None:
    """A model with full attention and recurrent state."""
    hybrid.states(world)


@scenario
def kv_on_a_gpu(world: World) -> None:
    """KV caches on a GPU, here a CUDA driver over host memory."""
    on_gpu.run(world)


@scenario
def router_events(world: World) -> None:
    """KV events as routers decode them."""
    routers.run(world, row, until)


@scenario
def node_events(world: World) -> None:
    """A node's own KV events as routers decode them."""
    routers.of_nodes(world, row, until)


@scenario
def kubernetes(world: World) -> None:
    """The commands of deploy/kubernetes/vllm."""
    manifests.run(world, row)


@scenario
def router(world: World) -> None:
    """Conversations over two servers behind the router."""
    conversations(world, row)


@scenario
def prefill_decode_router(world: World) -> None:
    """Two servers for prefill and two for decode behind the router; a prefill stops, then is killed."""
    behind_router.run(world, row)


@scenario
def prefill_decode(world: World) -> None:
    """Prefill in one engine, decode in an engine on another node, layer by layer."""
    prefill_and_decode.run(world, same, loaded, computed, counted, row)


@scenario
def secondary_tier(world: World) -> None:
    """The tier below vLLM's own offloading."""
    tier.run(world, row)


def main(names: list[str]) -> None:
    scenario.run(names, lambda folder: World(Path(folder)))
    width = max(len(what) for what, _ in ROWS)
    print()
    for what, result in ROWS:
        print(f"{what:<{width}}  {result}")


if __name__ == "__main__":
    main(sys.argv[1:])
