"""The fixed cost of a hit: the first token of one prompt that hits in vLLM's own cache, and that is loaded in both ways. The cost
of a miss: the first token of a prompt that is looked up and saved, and of a prompt that the connector never hears of.

The rounds are paired, so that the machine's other work affects all alike. All engines are asked for a hit one after the other.
One engine is asked for both prompts of a miss, in alternating order: two equal engines differ by up to 7 % for as long as they
live.

A node without optimization sums saved bytes slowly, on the processors on which these engines compute. To measure, name a node
with optimization: `LARDER=target/release/larder tests/engines/run fixed_cost`.
"""

import statistics
import time

from answers import counted, loaded, prompt, same
from driver import Engine

PROMPT_TOKENS, CHUNKS, HITS, MISSES, QUIET_SECONDS = 3_000, 93, 20, 60, 0.3


def run(world, row, until) -> None:
    # Nothing is evicted: the number of cached chunks is that of the saved chunks.
    cluster = world.cluster("fixed", 1, arena="2GiB")
    connector = {"socket": cluster.sockets[0]}

    def cached() -> float:
        return cluster.metric(0, "larder_cached_chunks", tier="host")

    def miss(engine: Engine, tokens: list[int]) -> dict:
        before = cached()
        answer = timed(engine, tokens)
        assert (loaded(answer), counted(answer, "failed_blocks")) == (0, 0), answer["counts"]
        until(lambda: cached() >= before + CHUNKS, "chunks are saved")
        return answer

    with (
        Engine(world.scratch, "fixed-plain") as plain,
        Engine(world.scratch, "fixed-async", connector, faults={}) as asynchronous,
        Engine(world.scratch, "fixed-sync", connector | {"load": "sync"}) as synchronous,
    ):
        # The first answers include one-time work.
        for engine in (plain, asynchronous, synchronous):
            timed(engine, prompt(99, PROMPT_TOKENS))
        report_misses(row, asynchronous, miss)
        times: dict[str, list[float]] = {"own hit": [], "async hit": [], "sync hit": []}
        for number in range(HITS + 1):
            tokens = prompt(500 + number, PROMPT_TOKENS)
            timed(plain, tokens)
            miss(asynchronous, tokens)
            answers = {"own hit": timed(plain, tokens)}
            answers["async hit"] = timed(asynchronous, tokens, forget=True)
            answers["sync hit"] = timed(synchronous, tokens)
            for kind in ("async hit", "sync hit"):
                answer = answers[kind]
                assert (loaded(answer), counted(answer, "failed_blocks")) == (2_976, 0), f"{kind}: {answer['counts']}"
                same(answer, answers["own hit"])
            if number > 0:
                for kind, answer in answers.items():
                    times[kind].append(first_token(answer))
    cluster.stop()
    for kind, found in times.items():
        row(f"first token of {PROMPT_TOKENS} tokens, {kind}", spread(found))
    for kind in ("async hit", "sync hit"):
        row(f"  {kind} above own hit", spread(apart(times[kind], times["own hit"])))


def report_misses(row, engine: Engine, miss) -> None:
    """Asks one engine for new prompts, alternately with the connector and without."""
    missed, alone = [], []
    for number in range(MISSES):
        one, other = (prompt(600 + 2 * number + place, PROMPT_TOKENS) for place in (0, 1))
        for kind in (missed, alone) if number % 2 else (alone, missed):
            kind.append(miss(engine, one) if kind is missed else timed(engine, other, leave_alone=True))
    tokens = [[first_token(answer) for answer in answers] for answers in (missed, alone)]
    calls = [[1_000 * answer["connector_seconds_to_first_token"] for answer in answers] for answers in (missed, alone)]
    row(f"first token of {PROMPT_TOKENS} tokens, miss", spread(tokens[0]))
    row(f"first token of {PROMPT_TOKENS} tokens, neither looked up nor saved", spread(tokens[1]))
    for what, (those, these) in (("a miss above that", tokens), ("of it, the connector's calls", calls)):
        share = 100 * statistics.median(apart(those, these)) / statistics.median(tokens[1])
        row(f"  {what}", f"{spread(apart(those, these))}, {share:.1f} %")


def timed(engine: Engine, tokens: list[int], **asked) -> dict:
    # The threads of the previous engine look for work for a while yet.
    time.sleep(QUIET_SECONDS)
    return engine.ask(tokens, max_tokens=2, **asked)


def first_token(answer: dict) -> float:
    return 1_000 * answer["first_token_seconds"][0]


def apart(those: list[float], these: list[float]) -> list[float]:
    return [one - other for one, other in zip(those, these, strict=True)]


def spread(milliseconds: list[float]) -> str:
    first, middle, last = statistics.quantiles(milliseconds, n=4)
    return f"{middle:.2f} ms (quartiles {first:.2f} to {last:.2f}, {len(milliseconds)} rounds)"
