"""What the steps are made with: a node and engines in processes of their own, the time that is left, and the report."""

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from answers import Answers, FirstTokens, by_length
from configurations import Configuration, configurations

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
STARTED = time.monotonic()
START_SECONDS = 240.0
STACKS_SECONDS = 2.0
END_SECONDS = 8.0


class OutOfTime(Exception):
    """A process does not answer, or the program has no time left."""


class EngineError(Exception):
    """An engine answered with an error."""


class Died(Exception):
    """A process ended by itself."""


def say(text: str) -> None:
    """Tells people the progress, with the seconds since the start."""
    print(f"{time.monotonic() - STARTED:7.2f}  {text}", flush=True)


class Process:
    """A process with a log, and lines of JSON on its output."""

    def __init__(self, name: str, command: list[str], folder: Path, environment: dict[str, str]) -> None:
        self.name, self._log = name, folder / f"{name}.log"
        with open(self._log, "wb") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=folder,
                env=environment,
                text=True,
                start_new_session=True,
            )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def write(self, asked: dict[str, Any]) -> None:
        """Writes a line to its input."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Died(f"{self.name} has died: {self.log_end()}") from None

    def answer(self, seconds: float) -> dict[str, Any]:
        """The next line."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            self._abort()
            raise OutOfTime(f"no answer from {self.name} within {seconds:.0f} s: {self.log_end()}") from None
        if line is None:
            raise Died(f"{self.name} has died ({self.process.wait()}): {self.log_end()}")
        return dict(json.loads(line))

    def log_end(self) -> str:
        """The last lines of the log."""
        lines = self._log.read_text(errors="replace").splitlines()
        return " | ".join(line[:300] for line in lines[-12:] if not line.startswith("Extension modules"))

    def kill(self) -> None:
        """Kills it with its children (kill -9)."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            say(f"{self.name} (process {self.process.pid}) does not end")

    def _abort(self) -> None:
        """Ends it so that an engine writes the stacks of its threads to its log."""
        self.process.send_signal(signal.SIGABRT)
        try:
            self.process.wait(STACKS_SECONDS)
        except subprocess.TimeoutExpired:
            pass

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)


class Node(Process):
    """A node with one tenant."""

    def __init__(self, larder: Path, folder: Path, arena: str) -> None:
        self.socket = str(folder / "default.sock")
        config = folder / "node.toml"
        config.write_text(
            f'[http]\nlisten = "127.0.0.1:0"\n[host]\narena_bytes = "{arena}"\n'
            f'[[tenants]]\nname = "default"\nsocket = "{self.socket}"\n'
        )
        command = [str(larder), "node", "--config", str(config)]
        super().__init__("node", command, folder, os.environ | {"LARDER_LOG": "info"})
        self._http = self.answer(30.0)["http"]

    def chunks(self) -> int:
        """The chunks in its memory."""
        with urllib.request.urlopen(f"http://{self._http}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if line.startswith("larder_cached_chunks{"))
        return int(sum(float(value) for labels, _, value in samples if 'tier="host"' in labels))


class Engine(Process):
    """An engine (engine.py)."""

    def __init__(self, rig: "Rig", name: str, configuration: Configuration) -> None:
        self._rig = rig
        command = [sys.executable, str(HERE / "engine.py"), json.dumps(configuration.options)]
        super().__init__(name, command, rig.scratch, os.environ | configuration.environment)
        self.facts: dict[str, Any] = {}

    def until_ready(self) -> None:
        """Waits until it has loaded its model."""
        self.facts = self.answer(min(START_SECONDS, self._rig.left()))
        self._rig.report.engines[self.name] = self.facts
        say(f"{self.name} is ready: {json.dumps(self.facts)}")

    def ask(self, prompts: list[list[int]], *, max_tokens: int = 16, at_once: bool = False, forget: bool = False) -> Answers:
        """Answers to prompts, one after the other or at once. `forget` empties the engine's own prefix cache before."""
        return Answers(**self._do("ask", prompts=prompts, max_tokens=max_tokens, at_once=at_once, forget=forget))

    def first_tokens(self, prompts: list[list[int]], *, rounds: int = 1, forget: bool = False) -> FirstTokens:
        """The times to the first tokens, one prompt after the other. `forget` empties the own prefix cache before each."""
        return FirstTokens(**self._do("first_tokens", prompts=prompts, rounds=rounds, forget=forget))

    def _do(self, do: str, **arguments: object) -> dict[str, Any]:
        self.write({"do": do} | arguments)
        told = self.answer(min(self._rig.patience_seconds, self._rig.left()))
        if "error" in told:
            raise EngineError(f"{self.name}: {told['error']}: {told['text']}")
        return told


class Report:
    """What was found: checks that passed or failed, and values. Written to a file after each row."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.rows: list[dict[str, Any]] = []
        self.first_tokens: dict[str, list[float]] = {}
        self.engines: dict[str, dict[str, Any]] = {}

    def add(self, step: str, what: str, verdict: str, detail: object = "") -> None:
        """Adds a row, and says it."""
        self.rows.append({"step": step, "what": what, "verdict": verdict, "detail": str(detail)})
        say(f"{verdict:7} {what}: {detail}" if detail != "" else f"{verdict:7} {what}")
        if self._file is not None:
            told = {"rows": self.rows, "first_token_seconds": self.first_tokens, "engines": self.engines}
            self._file.write_text(json.dumps(told, indent=1) + "\n")

    @property
    def failed(self) -> int:
        """The number of checks that failed."""
        return sum(row["verdict"] == "FAILED" for row in self.rows)

    def table(self) -> None:
        """Prints all rows, and the times to first tokens."""
        print(flush=True)
        for row in self.rows:
            print(f"{row['step']:2} {row['verdict']:7} {row['what']}  {row['detail']}")
        if self.first_tokens:
            print("\nmedian milliseconds to the first token, by the prompt's tokens")
        for name, seconds in self.first_tokens.items():
            print(f"  {name:42} {by_length(seconds)}")
        checks = sum(row["verdict"] in ("ok", "FAILED") for row in self.rows)
        print(f"{checks} checks, {self.failed} failed, {time.monotonic() - STARTED:.1f} s", flush=True)


class Rig:
    """The processes of a run, and its report."""

    def __init__(self, larder: Path, cpu: bool, seconds: float, report: Report) -> None:
        self.cpu, self.report = cpu, report
        self.patience_seconds = 180.0 if cpu else 30.0
        """An engine that takes longer for an answer hangs."""
        self.scratch = Path(tempfile.mkdtemp(prefix="larder-vllm-"))
        self.step = ""
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
        self._node = Node(self._larder, self.scratch, "1GiB" if self.cpu else "8GiB")
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

    def left(self) -> float:
        """The seconds left; raises `OutOfTime` if there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise OutOfTime("the time is over")
        return left

    def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> bool:
        """Waits for a condition, at most these seconds; whether it became true."""
        end = time.monotonic() + min(seconds, self.left())
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    def check(self, what: str, is_right: bool, detail: object = "") -> None:
        """Adds a check to the report."""
        self.report.add(self.step, what, "ok" if is_right else "FAILED", detail)

    def note(self, what: str, detail: object) -> None:
        """Adds a value to the report."""
        self.report.add(self.step, what, "note", detail)

    def skip(self, what: str, reason: str) -> None:
        """Adds a step that is left out to the report."""
        self.report.add(self.step, what, "skipped", reason)

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
