"""Scenarios: models whose layers read different parts of a prefix."""

import subprocess
import sys

from answers import computed, counted, loaded, prompt, same
from driver import BLOCK_TOKENS, HERE, Cluster, Engine
from model import WINDOW
from prefill_decode import Asked
from scenarios import row, until

WINDOW_BLOCKS = -(-(WINDOW - 1) // BLOCK_TOKENS)
"""Blocks that the token after a prefix sees in a layer with a sliding window."""


class Prompts:
    """Prompts, and their answers without Larder."""

    def __init__(self, engine: Engine, first_turn: int):
        """The first of several turns has `first_turn` tokens."""
        # The first prompt includes one-time compilation and allocation.
        engine.ask(prompt(99))
        self.first, self.other, self.third = (self._of(engine, prompt(seed)) for seed in (1, 2, 3))
        self.within_window = self._of(engine, prompt(4, WINDOW - 10))
        self.long = self._of(engine, prompt(5, 1_000))
        self.whole = self._of(engine, prompt(8, 6 * BLOCK_TOKENS))
        self.turns = []
        tokens, starts = prompt(6, first_turn), []
        for turn in range(3):
            self.turns.append(self._of(engine, tokens, *starts))
            starts.append(last_boundary(tokens))
            tokens = tokens + self.turns[-1][1]["tokens"][0] + prompt(7 + turn, 60)

    @staticmethod
    def _of(engine: Engine, tokens: list[int], *starts: int) -> tuple[list[int], dict]:
        """Computes a prompt in pieces that begin at `starts`, from the engine's own cache: in vLLM on CPUs, the answers of
        recurrent models depend on the pieces."""
        engine.ask(prompt(98, 40), forget=True)
        for start in starts:
            engine.ask(tokens[: start + 1], max_tokens=1)
        return tokens, engine.ask(tokens)


def last_boundary(tokens: list[int]) -> int:
    """The end of the last block after which a token is left."""
    return (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def make_model(world, kind: str) -> dict:
    folder = world.scratch / f"model-{kind}"
    subprocess.run([sys.executable, HERE / "model.py", folder, kind], check=True)
    return {"model": str(folder)}


def windows(world) -> None:
    """Full attention and sliding windows: blocks that a window does not reach are not loaded."""
    cluster, model = world.cluster("windows", 2), make_model(world, "windows")
    with Engine(world.scratch, "windows-reference", **model) as alone:
        prompts = Prompts(alone, 150)
    # Several steps for each prompt: windows pass while chunks are being saved.
    with Engine(world.scratch, "windows-first", node(cluster, 0), max_num_batched_tokens=256, **model) as first:
        for tokens, expected in (prompts.first, prompts.other, prompts.within_window, prompts.long):
            answer = first.ask(tokens)
            assert answer["tokens"] == expected["tokens"] and loaded(answer) == 0
        until(lambda: cluster.metric(0, "larder_cached_chunks", tier="host") >= 6 + 6 + 1 + 31, "chunks are saved")
        with Engine(world.scratch, "windows-second", node(cluster, 1), **model) as second:
            loaded_from_the_other_node(cluster, second, prompts)
            several_turns(second, prompts)
    unlucky(world, cluster, model, prompts)
    handed_over(world, "windows", model | {"max_num_batched_tokens": 256}, prompts, WINDOW_BLOCKS)
    ranks(world, model)


def loaded_from_the_other_node(cluster: Cluster, engine: Engine, prompts: Prompts) -> None:
    for what, (tokens, expected), window_blocks in (
        ("200 tokens", prompts.first, WINDOW_BLOCKS),
        ("a prompt within the window", prompts.within_window, 1),
        ("1,000 tokens, computed in steps of 256", prompts.long, WINDOW_BLOCKS),
    ):
        before = cluster.metric(1, "larder_peer_received_bytes_total")
        answer = engine.ask(tokens)
        came = cluster.metric(1, "larder_peer_received_bytes_total") - before
        hit = last_boundary(tokens)
        assert (loaded(answer), computed(answer)) == (hit, len(tokens) - hit), f"{answer['counts']}"
        same(answer, expected)
        blocks = hit // BLOCK_TOKENS + window_blocks
        assert counted(answer, "loaded_blocks") == blocks, f"{answer['counts']}"
        assert came > 0, "the blocks did not come from the other node"
        row(f"sliding windows, {what}", f"{hit} loaded over QUIC, {blocks} blocks, identical")


def several_turns(engine: Engine, prompts: Prompts) -> None:
    found = []
    for number, (tokens, expected) in enumerate(prompts.turns):
        answer = engine.ask(tokens, forget=True)
        same(answer, expected)
        found.append(loaded(answer))
        if number:
            # Decoded tokens were saved as well as prefilled ones.
            before = len(prompts.turns[number - 1][0]) + len(expected["tokens"][0])
            assert found[-1] == (before - 1) // BLOCK_TOKENS * BLOCK_TOKENS, f"{found}"
    row("sliding windows, three turns", f"{' '.join(map(str, found))} tokens loaded, identical")


def unlucky(world, cluster: Cluster, model: dict, prompts: Prompts) -> None:
    """Chunks that do not come, altered bytes, a node that goes away: recomputed, identical, counted."""
    faults = {"lose_chunks_from": 3}
    with Engine(world.scratch, "windows-unlucky", node(cluster, 1), faults=faults, **model) as engine:
        tokens, expected = prompts.first
        answer = engine.ask(tokens)
        same(answer, expected)
        failed = counted(answer, "failed_blocks")
        assert (counted(answer, "loads"), failed) == (1, 6 + WINDOW_BLOCKS), f"{answer['counts']}"
        row("sliding windows, 3 of 6 chunks do not come", f"{failed} blocks counted, computed as a whole, identical")
        cluster.flip_a_bit_in_every_page(0)
        tokens, expected = prompts.other
        answer = engine.ask(tokens)
        same(answer, expected)
        assert (loaded(answer), computed(answer)) == (0, 200), f"{answer['counts']}"
        assert cluster.metric(1, "larder_peer_fetches_total", outcome="checksum") > 0, "wrong bytes were not noticed"
        row("sliding windows, altered bytes", "a miss, identical")
        cluster.stop()
        tokens, expected = prompts.third
        same(engine.ask(tokens), expected)
        answer = engine.ask(tokens, forget=True)
        same(answer, expected)
        assert counted(answer, "lookups_without_node") == 1, f"{answer['counts']}"
        row("sliding windows, the node goes", "identical, the lookup without it counted")


def handed_over(world, name: str, model: dict, prompts: Prompts, others: int) -> None:
    """Prefill on one node and decode on another, in turn and at the same time; `others` blocks are of other groups than attention."""
    cluster = world.cluster(f"{name}-handed-over", 2)
    first, to_node = {"do_remote_decode": True}, {"do_remote_prefill": True, "remote_node": "node-0"}
    with (
        Engine(world.scratch, f"{name}-writes", node(cluster, 0), role="kv_producer", **model) as prefill,
        Engine(world.scratch, f"{name}-reads", node(cluster, 1), role="kv_consumer", **model) as decode,
    ):

        def in_turn(tokens: list[int]) -> dict:
            told = prefill.ask(tokens, max_tokens=1, kv_transfer_params=first)["kv_transfer_params"][0]
            return decode.ask(tokens, kv_transfer_params=told)

        def together(tokens: list[int]) -> dict:
            decoding = Asked(decode, tokens, {"kv_transfer_params": to_node})
            prefilling = Asked(prefill, tokens, {"max_tokens": 1, "kv_transfer_params": first})
            answer = decoding.get()
            prefilling.get()
            return answer

        for how, ask, (tokens, expected) in (
            ("in turn", in_turn, prompts.first),
            ("together", together, prompts.other),
            ("together, 1,000 tokens", together, prompts.long),
        ):
            answer = ask(tokens)
            same(answer, expected)
            hit = last_boundary(tokens)
            assert (loaded(answer), computed(answer)) == (hit, len(tokens) - hit), f"{how}: {answer['counts']}"
            assert counted(answer, "loaded_blocks") == hit // BLOCK_TOKENS + others, f"{how}: {answer['counts']}"
            if ask is together:
                assert counted(answer, "followed_chunks") == hit // BLOCK_TOKENS, f"{how}: {answer['counts']}"
            row(f"{name}, prefill and decode {how}", f"{hit} loaded, identical")
        for ask in (together, in_turn):
            # Prefill computes the whole prompt, and keeps no state one block earlier: decode computes it too.
            tokens, expected = prompts.whole
            answer = ask(tokens)
            same(answer, expected)
            row(f"{name}, a prompt of whole blocks", f"{loaded(answer)} loaded, {computed(answer)} computed, identical")
    given = cluster.metric(0, "larder_handed_over_layers_total", how="sent")
    assert given > 0, "nothing was handed over"
    cluster.stop()


def ranks(world, model: dict) -> None:
    """Two ranks, and chunks longer than the window: only the last blocks of such chunks are kept."""
    cluster = world.cluster("windows-ranks", 1)
    tokens = prompt(1)
    with Engine(
        world.scratch, "windows-ranks", node(cluster, 0, chunk_tokens=128), tensor_parallel_size=2, **model
    ) as engine:
        expected = engine.ask(tokens)
        assert loaded(expected) == 0
        until(lambda: cluster.metric(0, "larder_cached_chunks", tier="host") >= 1, "the chunk is saved")
        answer = engine.ask(tokens, forget=True)
        same(answer, expected)
        assert (loaded(answer), computed(answer)) == (128, 72), f"{answer['counts']}"
        blocks = 128 // BLOCK_TOKENS + WINDOW_BLOCKS
        assert counted(answer, "loaded_blocks") == 2 * blocks, f"{answer['counts']}"
        row("sliding windows, two ranks, chunks of 128", f"128 loaded, {blocks} blocks by each rank, identical")
    cluster.stop()


def states(world) -> None:
    """Full attention and recurrent state: a prefix ends where a state was saved."""
    cluster, model = world.cluster("states", 2), make_model(world, "recurrent") | {"recurrent": True}
    with Engine(world.scratch, "states-reference", **model) as alone:
        # Decoding fills no block: a turn that found such a block would continue from other pieces than the engine alone.
        prompts = Prompts(alone, 130)
    with Engine(world.scratch, "states-first", node(cluster, 0), **model) as first:
        for tokens, expected in (prompts.first, prompts.long):
            same(first.ask(tokens), expected)
        until(lambda: cluster.metric(0, "larder_cached_chunks", tier="host") >= 6 + 31, "chunks are saved")
        with Engine(world.scratch, "states-second", node(cluster, 1), **model) as second:
            for tokens, expected in (prompts.first, prompts.long):
                answer = second.ask(tokens)
                same(answer, expected)
                hit = last_boundary(tokens)
                assert (loaded(answer), computed(answer)) == (hit, len(tokens) - hit), f"{answer['counts']}"
                blocks = hit // BLOCK_TOKENS + 1
                assert counted(answer, "loaded_blocks") == blocks, f"{answer['counts']}"
                row(f"recurrent state, {len(tokens)} tokens", f"{hit} loaded over QUIC, {blocks} blocks, identical")
            between_states(second, prompts)
            turns_with_states(second, prompts)
    cluster.stop()
    handed_over(world, "states", model, prompts, 1)


def between_states(engine: Engine, prompts: Prompts) -> None:
    """The attention of these tokens is cached, the state after them is not."""
    tokens = prompts.first[0][:100]
    answer = engine.ask(tokens, forget=True)
    assert (loaded(answer), computed(answer)) == (0, 100), f"{answer['counts']}"
    row("recurrent state, a prompt that ends before it", "nothing is loaded: no boundary is legal")


def turns_with_states(engine: Engine, prompts: Prompts) -> None:
    found = []
    for number, (tokens, expected) in enumerate(prompts.turns):
        answer = engine.ask(tokens, forget=True)
        same(answer, expected)
        found.append(loaded(answer))
        # vLLM kept the state at the last block of the previous turn.
        assert found[-1] == (last_boundary(prompts.turns[number - 1][0]) if number else 0), f"{found}"
    row("recurrent state, three turns", f"{' '.join(map(str, found))} tokens loaded, identical")


def node(cluster: Cluster, number: int, **connector) -> dict:
    # Enough time even on a busy machine: a prefix that comes late is computed.
    return {"socket": cluster.sockets[number], "prefetch_seconds": 10.0} | connector
