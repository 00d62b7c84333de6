"""What the programs of faults and of vLLM share: a node and engines in processes of their own, the report, and the end."""

import argparse
import ctypes
import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STARTED = time.monotonic()
END_SECONDS = 8.0


class OutOfTime(Exception):
    """A process does not answer, or a step or the whole program has no time left."""


class EngineError(Exception):
    """An engine answered with an error."""


class Died(Exception):
    """A process ended by itself."""


def say(text: str) -> None:
    """Tells people the progress, with the seconds since the start."""
    print(f"{time.monotonic() - STARTED:7.2f}  {text}", flush=True)


def wait_until(condition: Callable[[], bool], end: float) -> bool:
    """Waits for a condition until this time of the monotonic clock; whether it became true."""
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


class Process:
    """A process with a log, and lines of JSON on its input and output."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str]) -> None:
        self.name, self._log = log.stem, log
        with open(log, "ab") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=log.parent,
                env=os.environ | environment,
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
            self.hangs()
            raise OutOfTime(f"no answer from {self.name} within {seconds:.1f} s: {self.log_end()}") from None
        if line is None:
            raise Died(f"{self.name} has died ({self.process.wait()}): {self.log_end()}")
        return dict(json.loads(line))

    def told(self, seconds: float) -> dict[str, Any]:
        """The next line; raises `EngineError` if it tells an error."""
        told = self.answer(seconds)
        if "error" in told:
            raise EngineError(f"{self.name}: {told['error']}: {told['text']}")
        return told

    def hangs(self) -> None:
        """Is called when it does not answer in time."""

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None

    def log(self) -> str:
        """What it wrote to its log."""
        return self._log.read_text(errors="replace")

    def log_end(self) -> str:
        """The last lines of the log."""
        lines = self.log().splitlines()
        return " | ".join(line[:300] for line in lines[-12:] if not line.startswith("Extension modules"))

    def kill(self) -> None:
        """Kills it with its children (kill -9), and waits for its end."""
        self.kill_only()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            say(f"{self.name} (process {self.process.pid}) does not end")

    def kill_only(self) -> None:
        """Kills it with its children (kill -9)."""
        # A process that was waited for may have given its number to another one.
        if self.process.returncode is None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)


class Node(Process):
    """A node with one tenant, with its files in a folder of its own."""

    def __init__(self, larder: Path, folder: Path, environment: dict[str, str], arena: str, sections: str = "") -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.socket, self.http = folder, str(folder / "default.sock"), ""
        config = folder / "node.toml"
        config.write_text(
            f'{sections}\n[http]\nlisten = "127.0.0.1:0"\n[host]\narena_bytes = "{arena}"\n'
            f'[[tenants]]\nname = "default"\nsocket = "{self.socket}"\n'
        )
        command = [str(larder), "node", "--config", str(config)]
        super().__init__(command, folder / "node.log", environment | {"LARDER_LOG": "info"})

    def until_ready(self, seconds: float) -> None:
        """Waits until it serves."""
        self.http = self.answer(seconds)["http"]

    def metric(self, name: str) -> dict[str, float]:
        """The samples of a metric that are not 0, by their labels."""
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        samples = (line.removeprefix(name).rpartition(" ") for line in lines if line.startswith((f"{name}{{", f"{name} ")))
        return {labels: float(value) for labels, _, value in samples if float(value) != 0}


class Report:
    """What was found: checks that passed or failed, and values. Written to a file after each row."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.step = ""
        self.rows: list[dict[str, Any]] = []
        self.more: dict[str, Any] = {}
        """What else the file has, by name."""

    def check(self, what: str, is_right: bool, detail: object = "") -> None:
        """Adds a check."""
        self._add(what, "ok" if is_right else "FAILED", detail)

    def note(self, what: str, detail: object) -> None:
        """Adds a value."""
        self._add(what, "note", detail)

    def skip(self, what: str, reason: str) -> None:
        """Adds what is left out."""
        self._add(what, "skipped", reason)

    def _add(self, what: str, verdict: str, detail: object) -> None:
        at = round(time.monotonic() - STARTED, 2)
        self.rows.append({"step": self.step, "what": what, "verdict": verdict, "detail": detail, "at": at})
        say(f"{verdict:7} {what}: {detail}" if detail != "" else f"{verdict:7} {what}")
        if self._file is not None:
            self._file.write_text(json.dumps({"rows": self.rows} | self.more, indent=1, default=str) + "\n")

    @property
    def failed(self) -> int:
        """The number of checks that failed."""
        return sum(row["verdict"] == "FAILED" for row in self.rows)

    def table(self) -> None:
        """Prints all rows."""
        print(flush=True)
        for row in self.rows:
            print(f"{row['step']:2} {row['verdict']:7} {row['what']}  {row['detail']}")
        checks = sum(row["verdict"] in ("ok", "FAILED") for row in self.rows)
        print(f"{checks} checks, {self.failed} failed, {time.monotonic() - STARTED:.1f} s", flush=True)


def run_step(report: Report, name: str, action: Callable[[], None]) -> bool:
    """Runs a step; whatever goes wrong there, the next one can follow. Returns whether it came to its end."""
    say(f"step {report.step}: {name}")
    try:
        action()
        return True
    except (OutOfTime, EngineError, Died) as error:
        report.check(name, False, error)
    except Exception as error:  # noqa: BLE001
        report.check(f"{name}: a fault of this program, or of a process", False, f"{type(error).__name__}: {error}")
    return False


def end_after(seconds: float, report: Report, close: Callable[[], None]) -> None:
    """Ends the program with its table when its time is over, whatever hangs. SIGTERM ends it as its own end does."""

    def end() -> None:
        report.check(f"the whole run: within {seconds:.0f} s", False)
        report.table()
        close()
        os._exit(1)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def missing(package: str, *, needs_gpu: bool) -> str | None:
    """What this machine lacks for a run with this package of Python."""
    if needs_gpu:
        try:
            if (result := ctypes.CDLL("libcuda.so.1").cuInit(0)) != 0:
                return f"the CUDA driver finds no GPU (cuInit: {result})"
        except OSError:
            return "no CUDA driver is installed"
    return None if importlib.util.find_spec(package) else f"{sys.executable} has no {package}"


def options_of(description: str | None, *, seconds: float, last_step: int) -> argparse.ArgumentParser:
    """The options that the programs share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--larder", type=Path, default=ROOT / "target/dist/larder", help="the node's program")
    parser.add_argument("--json", type=Path, help="a file for the report, written after each line")
    steps = ",".join(str(number) for number in range(1, last_step + 1))
    parser.add_argument("--only", default=steps, help="the steps to run")
    parser.add_argument("--seconds", type=float, default=seconds, help="limit of the whole run")
    return parser
