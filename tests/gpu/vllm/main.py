"""Real vLLM on a GPU with Larder's connector and its tier: the tokens beside those of vLLM alone, and the times to first tokens.

    tests/gpu/run vllm            on a machine with a GPU and vLLM
    tests/gpu/run vllm --cpu      small, with vLLM for CPUs, without the steps that need a GPU

All engines start at the same time, and take some 50 GiB of the GPU's memory; with --only there are fewer. A check that fails is
reported, and the rest goes on. The exit status is 1 if any check failed.

Tokens must be identical where the same shapes are computed: after loads those of vLLM's own hit, after saves those that vLLM
computes alone. vLLM's own hit and what it computes alone may differ by themselves, since their shapes differ.
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

from answers import by_length
from rig import Rig
from steps import Steps

from processes import Report, end_after, missing, options_of, run_step, say

END_SECONDS = 5.0
"""Of the whole run's time, kept for its end."""


class Step(NamedTuple):
    """A step."""

    name: str
    action: Callable[[], None]
    engines: tuple[str, ...]
    needs: frozenset[int] = frozenset()
    """The steps whose results it compares with."""
    needs_gpu: bool = False


def steps_of(rig: Rig) -> dict[int, Step]:
    """All steps, by their numbers."""
    steps, first = Steps(rig), frozenset({1})
    return {
        1: Step("vLLM alone", steps.alone, ("alone",)),
        2: Step("Larder saves", steps.saves, ("saver",), first),
        3: Step("Larder loads in a new engine", steps.loads, ("loader",), first | {2}),
        4: Step("preemption", steps.preemption, ("exact", "tiny")),
        5: Step("vLLM's CPU offloading", steps.offloading, ("offloader",), first, needs_gpu=True),
        6: Step("LarderTier", steps.tier, ("tier-saver", "tier-loader"), first, needs_gpu=True),
        7: Step("Larder loads layer by layer", steps.sync, ("sync",), first | {2}),
    }


def run_steps(rig: Rig, only: set[int]) -> None:
    """Runs the steps, and those that they need."""
    steps = steps_of(rig)
    chosen = only.union(*(steps[number].needs for number in only))
    for number in sorted(chosen):
        if rig.cpu and steps[number].needs_gpu:
            rig.report.step = str(number)
            rig.report.skip(steps[number].name, "it needs a GPU")
            chosen.remove(number)
    rig.start(name for number in sorted(chosen) for name in steps[number].engines)
    done: set[int] = set()
    for number in sorted(chosen):
        rig.report.step = str(number)
        if missing := steps[number].needs - done:
            rig.report.skip(steps[number].name, f"it needs step {', '.join(map(str, sorted(missing)))}")
        elif run_step(rig.report, steps[number].name, steps[number].action):
            done.add(number)
        rig.end_engines(steps[number].engines)


def main() -> int:
    """Runs the steps."""
    parser = options_of(__doc__, seconds=300.0, last_step=7)
    parser.add_argument("--cpu", action="store_true", help="small, with vLLM for CPUs")
    options = parser.parse_args()
    if lacking := missing("vllm", needs_gpu=not options.cpu):
        say(f"nothing to check here: {lacking}")
        return 0
    rig = Rig(options.larder, options.cpu, options.seconds - END_SECONDS, Report(options.json))
    end_after(options.seconds, rig.report, rig.close)
    try:
        run_steps(rig, {int(number) for number in options.only.split(",")})
    finally:
        rig.close()
    rig.report.table()
    print("\nmedian milliseconds to the first token, by the prompt's tokens")
    for name, seconds in rig.report.more["first_token_seconds"].items():
        print(f"  {name:42} {by_length(seconds)}")
    return 1 if rig.report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
