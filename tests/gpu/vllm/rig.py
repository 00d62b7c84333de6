"""What the steps are made with: the engines, the node that they share, and the time that is left."""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from answers import Answers, FirstTokens
from configurations import Configuration, configurations

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from processes import STARTED, Node, OutOfTime, Process, Report, say, wait_until  # noqa: E402

START_SECONDS = 240.0
STACKS_SECONDS = 2.0


class Engine(Process):
    """An engine (engine.py)."""

    def __init__(self, rig: "Rig", name: str, configuration: Configuration) -> None:
        self._rig = rig
        command = [sys.executable, str(HERE / "engine.py"), json.dumps(configuration.options)]
        super().__init__(command, rig.scratch / f"{name}.log", configuration.environment)
        self.facts: dict[str, Any] = {}

    def until_ready(self) -> None:
        """Waits until it has loaded its model."""
        self.facts = self.answer(min(START_SECONDS, self._rig.left()))
        self._rig.report.more["engines"][self.name] = self.facts
        say(f"{self.name} is ready: {json.dumps(self.facts)}")

    def ask(self, prompts: list[list[int]], *, max_tokens: int = 16, at_once: bool = False, forget: bool = False) -> Answers:
        """Answers to prompts, one after the other or at once. `forget` empties the engine's own prefix cache before."""
        return Answers(**self._do("ask", prompts=prompts, max_tokens=max_tokens, at_once=at_once, forget=forget))

    def first_tokens(self, prompts: list[list[int]], *, rounds: int = 1, forget: bool = False) -> FirstTokens:
        """The times to the first tokens, one prompt after the other. `forget` empties the own prefix cache before each."""
        return FirstTokens(**self._do("first_tokens", prompts=prompts, rounds=rounds, forget=forget))

    def _do(self, do: str, **arguments: object) -> dict[str, Any]:
        self.write({"do": do} | arguments)
        return self.told(min(self._rig.patience_seconds, self._rig.left()))

    def hangs(self) -> None:
        """Has it write the stacks of its threads to its log."""
        self.process.send_signal(signal.SIGABRT)
        wait_until(lambda: not self.is_alive(), time.monotonic() + STACKS_SECONDS)


class Rig:
    """The processes of a run, and its report."""

    def __init__(self, larder: Path, cpu: bool, seconds: float, report: Report) -> None:
        self.cpu, self.report = cpu, report
        self.patience_seconds = 180.0 if cpu else 30.0
        """An engine that takes longer for an answer hangs."""
        self.scratch = Path(tempfile.mkdtemp(prefix="larder-vllm-"))
        report.more |= {"engines": {}, "first_token_seconds": {}}
        self._larder, self._end = larder.resolve(), STARTED + seconds
        self._node: Node | None = None
        self._engines: dict[str, Engine] = {}

    @property
    def node(self) -> Node:
        """The node that engines share."""
        assert self._node is not None
        return self._node

    def start(self, names: Iterable[str]) -> None:
        """Makes the models; starts the node, and all engines at the same time, since each takes half a minute to start."""
        command = [sys.executable, str(HERE / "model.py"), str(self.scratch), *(["--cpu"] if self.cpu else [])]
        subprocess.run(command, check=True, timeout=self.left())
        say("the models are made")
        self._node = Node(self._larder, self.scratch / "node", {}, "1GiB" if self.cpu else "8GiB")
        self._node.until_ready(30.0)
        known = configurations(self.scratch, self._node.socket, self.cpu)
        for name in names:
            self._engines[name] = Engine(self, name, known[name])
        say(f"engines start: {', '.join(self._engines)}")

    def engine(self, name: str) -> Engine:
        """An engine that is ready."""
        engine = self._engines[name]
        if not engine.facts:
            engine.until_ready()
        return engine

    def end_engines(self, names: Iterable[str]) -> None:
        """Ends engines that no further step asks."""
        for name in names:
            self._engines[name].kill()

    def chunks(self) -> int:
        """The chunks in the node's memory."""
        samples = self.node.metric("larder_cached_chunks").items()
        return int(sum(value for labels, value in samples if 'tier="host"' in labels))

    def left(self) -> float:
        """The seconds left; raises `OutOfTime` if there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise OutOfTime("the time is over")
        return left

    def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> bool:
        """Waits for a condition, at most these seconds; whether it became true."""
        return wait_until(condition, time.monotonic() + min(seconds, self.left()))

    def close(self) -> None:
        """Ends everything. The logs are kept if a check failed."""
        for process in (*self._engines.values(), *([self._node] if self._node else [])):
            process.kill()
        if self.report.failed:
            for model in ("large", "small"):
                shutil.rmtree(self.scratch / model, ignore_errors=True)
            say(f"the logs are in {self.scratch}")
        else:
            shutil.rmtree(self.scratch, ignore_errors=True)
