"""The fixed cost of a hit: the first token of one prompt computed, hit in vLLM's own cache, loaded in both ways, and missed.

The rounds are paired: each asks every engine for the same new prompt, one after the other, so that what else the machine does meanwhile
falls on all of them alike. Those that compute it take turns at being the first; one of them is a control, another engine without Larder:
two engines that are the same differ by up to 7 % for as long as they live, so a miss costs what it takes beyond the control.

A node without optimisation sums what is saved slowly, on the processors on which these engines compute: to measure, name one with it,
`LARDER=target/release/larder tests/engines/run fixed_cost`.
"""

import statistics
import time
from functools import partial

from answers import counted, loaded, prompt, same
from driver import Engine

PROMPT_TOKENS, ROUNDS, QUIET_SECONDS = 3_000, 20, 0.3


def run(world, row, until) -> None:
    cluster = world.cluster("fixed", 1)
    connector = {"socket": cluster.sockets[0]}
    times: dict[str, list[float]] = {}

    def cached() -> float:
        return cluster.metric(0, "larder_cached_chunks", tier="host")

    with (
        Engine(world.scratch, "fixed-plain") as plain,
        Engine(world.scratch, "fixed-control") as control,
        Engine(world.scratch, "fixed-async", connector) as asynchronous,
        Engine(world.scratch, "fixed-sync", connector | {"load": "sync"}) as synchronous,
    ):
        computing = {"computed": plain, "control": control, "miss": asynchronous}
        for engine in (*computing.values(), synchronous):
            engine.ask(prompt(99), max_tokens=2)
        for number in range(ROUNDS + 1):
            ask = partial(Engine.ask, max_tokens=2)
            tokens, before, answers = prompt(500 + number, PROMPT_TOKENS), cached(), {}
            turns = list(computing)
            for kind in turns[number % 3 :] + turns[: number % 3]:
                # The threads of the engine before look for work for a while yet.
                time.sleep(QUIET_SECONDS)
                answers[kind] = ask(computing[kind], tokens)
                if kind == "miss":
                    until(lambda before=before: cached() >= before + 93, "chunks are saved")
            answers["own hit"] = ask(plain, tokens)
            answers["async hit"] = ask(asynchronous, tokens, forget=True)
            answers["sync hit"] = ask(synchronous, tokens)
            for kind, expected in (("miss", 0), ("async hit", 2_976), ("sync hit", 2_976)):
                answer = answers[kind]
                assert (loaded(answer), counted(answer, "failed_blocks")) == (expected, 0), f"{kind}: {answer['counts']}"
            for kind in ("async hit", "sync hit"):
                same(answers[kind], answers["own hit"])
            # The first round pays for what is made once.
            if number > 0:
                for kind, answer in answers.items():
                    times.setdefault(kind, []).append(1_000 * answer["first_token_seconds"][0])
    cluster.stop()
    for kind, found in sorted(times.items()):
        first, middle, last = statistics.quantiles(found, n=4)
        row(f"first token of {PROMPT_TOKENS} tokens, {kind}", f"{middle:.1f} ms (quartiles {first:.1f} to {last:.1f})")
    for kind, base in (("async hit", "own hit"), ("sync hit", "own hit"), ("miss", "computed"), ("control", "computed")):
        apart = [one - other for one, other in zip(times[kind], times[base], strict=True)]
        first, middle, last = statistics.quantiles(apart, n=4)
        share = f", {100 * middle / statistics.median(times[base]):.1f} %" if base == "computed" else ""
        row(f"  {kind} above {base}", f"{middle:.1f} ms{share} (quartiles {first:.1f} to {last:.1f} ms, {ROUNDS} pairs)")
