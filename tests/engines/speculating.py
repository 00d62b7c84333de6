"""Real vLLM that speculates: its answers with Larder equal those without, and drafts find their own KV again."""

import subprocess
import sys

from answers import computed, loaded, prompt, same
from driver import BLOCK_TOKENS, HERE, Engine
from scenarios import until

CHUNKS = 6
"""Chunks of a prompt of 200 tokens."""
ANSWER = 40


def run(world, row) -> None:
    head = world.scratch / "eagle"
    subprocess.run([sys.executable, HERE / "model.py", head, "eagle"], check=True)
    for method, config, kept in (
        ("ngram", {"prompt_lookup_max": 3, "prompt_lookup_min": 1}, CHUNKS),
        # The target is its own draft: with the right KV, every draft is accepted.
        ("draft_model", {"model": str(world.scratch / "model"), "max_model_len": 4_000}, CHUNKS),
        # The last block is computed again: its drafts depend on the token after it.
        ("eagle", {"model": str(head), "max_model_len": 4_000}, CHUNKS - 1),
    ):
        speculation = {"speculative_config": {"method": method, "num_speculative_tokens": 3} | config}
        one_method(world, row, method, speculation, kept * BLOCK_TOKENS)


def one_method(world, row, method: str, speculation: dict, kept: int) -> None:
    tokens = prompt(70)
    with Engine(world.scratch, f"{method}-reference", **speculation) as alone:
        alone.ask(tokens, max_tokens=ANSWER)
        # The engine's own cache ends where a load would end.
        expected = alone.ask(tokens, max_tokens=ANSWER)
    assert expected["counts"]["prompt_tokens_by_source.local_cache_hit"] == kept, f"{expected['counts']}"
    cluster = world.cluster(f"speculating-{method}", 2)
    saver = Engine(world.scratch, f"{method}-saves", {"socket": cluster.sockets[0]}, **speculation)
    with saver:
        saver.ask(tokens, max_tokens=ANSWER)
        until(lambda: cluster.metric(0, "larder_cached_chunks", tier="host") >= CHUNKS + 1, "chunks are saved")
    with Engine(world.scratch, f"{method}-loads", {"socket": cluster.sockets[1]}, **speculation) as loads:
        answer = loads.ask(tokens, max_tokens=ANSWER)
        same(answer, expected)
        assert (loaded(answer), computed(answer)) == (kept, len(tokens) - kept), f"{answer['counts']}"
        accepted, of = (rate(one) for one in (answer, expected))
        # Without their KV, drafts would be different.
        assert accepted == of, f"{accepted} drafts of the load were accepted, {of} without Larder"
        row(f"speculation by {method}", f"{kept} loaded, identical; {accepted[0]:.0f} of {accepted[1]:.0f} drafts accepted, as without")
    cluster.stop()


def rate(answer: dict) -> tuple[float, float]:
    """The number of accepted drafts, and of all drafts."""
    return tuple(answer["counts"].get(f"spec_decode_num_{what}", 0) for what in ("accepted_tokens", "draft_tokens"))
