"""Real vLLM on a GPU with Larder's connector and its tier: the tokens beside those of vLLM alone, and the times to first tokens.

    tests/gpu/run vllm            on a machine with a GPU and vLLM
    tests/gpu/run vllm --cpu      small, with vLLM for CPUs, without the steps that need a GPU

All engines start at the same time, and take some 50 GiB of the GPU's memory; with --only there are fewer. A check that fails is
reported, and the rest goes on. The exit status is 1 if any check failed.

Tokens must be identical where the same shapes are computed: after loads those of vLLM's own hit, after saves those that vLLM
computes alone. vLLM's own hit and what it computes alone may differ by themselves, since their shapes differ.
"""

import argparse
import ctypes
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rig import ROOT, Died, EngineError, OutOfTime, Report, Rig, say
from steps import Steps

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
            rig.step = str(number)
            rig.skip(steps[number].name, "it needs a GPU")
            chosen.remove(number)
    rig.start(name for number in sorted(chosen) for name in steps[number].engines)
    done: set[int] = set()
    for number in sorted(chosen):
        rig.step = str(number)
        if missing := steps[number].needs - done:
            rig.skip(steps[number].name, f"it needs step {', '.join(map(str, sorted(missing)))}")
        elif run_step(rig, number, steps[number]):
            done.add(number)
        rig.end_engines(steps[number].engines)


def run_step(rig: Rig, number: int, step: Step) -> bool:
    """Runs a step; whatever goes wrong there, the next one follows. Returns whether it came to its end."""
    say(f"step {number}: {step.name}")
    try:
        step.action()
        return True
    except (OutOfTime, EngineError, Died) as error:
        rig.check(step.name, False, error)
    except Exception as error:  # noqa: BLE001
        rig.check(f"{step.name}: a fault of this program, or of a process", False, f"{type(error).__name__}: {error}")
    return False


def watch(rig: Rig, seconds: float) -> None:
    """Ends the program with its table when its time is over, whatever hangs."""

    def end() -> None:
        rig.check(f"the whole run: within {seconds:.0f} s", False)
        rig.report.table()
        rig.close()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def missing(cpu: bool) -> str | None:
    """What this machine lacks for a run."""
    if not cpu:
        try:
            if (result := ctypes.CDLL("libcuda.so.1").cuInit(0)) != 0:
                return f"the CUDA driver finds no GPU (cuInit: {result})"
        except OSError:
            return "no CUDA driver is installed"
    return None if importlib.util.find_spec("vllm") else f"{sys.executable} has no vLLM"


def main() -> int:
    """Runs the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--larder", type=Path, default=ROOT / "target/dist/larder", help="the node's program")
    parser.add_argument("--json", type=Path, help="a file for the report, written after each line")
    parser.add_argument("--cpu", action="store_true", help="small, with vLLM for CPUs")
    parser.add_argument("--only", default="1,2,3,4,5,6,7", help="the steps to run; those that they need run too")
    parser.add_argument("--seconds", type=float, default=300.0, help="limit of the whole run")
    options = parser.parse_args()
    if lacking := missing(options.cpu):
        say(f"nothing to check here: {lacking}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    rig = Rig(options.larder, options.cpu, options.seconds - END_SECONDS, Report(options.json))
    watch(rig, options.seconds)
    try:
        run_steps(rig, {int(number) for number in options.only.split(",")})
    finally:
        rig.close()
    rig.report.table()
    return 1 if rig.report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
