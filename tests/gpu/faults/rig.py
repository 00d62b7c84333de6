"""What the faults are made with: nodes and engines in processes of their own, the card's memory, and the report."""

import ctypes
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
STARTED = time.monotonic()
MIB = 1 << 20
END_SECONDS = 8.0


class OutOfTime(Exception):
    """A step, or the whole program, has no time left."""


class EngineError(Exception):
    """An engine answered with an error."""


class Died(Exception):
    """A process ended by itself."""


def say(text: str) -> None:
    """Tells people the progress, with the seconds since the start."""
    print(f"{time.monotonic() - STARTED:7.2f}  {text}", flush=True)


class Deadline:
    """A time after which nothing is waited for."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left; raises `OutOfTime` if there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise OutOfTime("the step's time is over")
        return left

    def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Waits for a condition, at most these seconds; whether it became true."""
        end = min(self._end, time.monotonic() + seconds)
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True


class Process:
    """A process with a log, and lines of JSON on its output."""

    def __init__(self, name: str, command: list[str], log: Path, environment: dict[str, str]) -> None:
        self.name, self._log = name, log
        with open(log, "ab") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True
            )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        """Its number."""
        return self.process.pid

    def answer(self, seconds: float) -> dict[str, Any]:
        """The next line."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise OutOfTime(f"no answer from {self.name} within {seconds:.1f} s") from None
        if line is None:
            raise Died(f"{self.name} has died ({self.process.wait()}): {self.log_end()}")
        return dict(json.loads(line))

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None

    def log(self) -> str:
        """What it wrote to its log."""
        return self._log.read_text(errors="replace")

    def log_end(self) -> str:
        """The last lines of the log."""
        return " | ".join(self.log().splitlines()[-8:])

    def kill(self) -> None:
        """Kills it (kill -9), and waits for its end."""
        self.process.kill()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            say(f"{self.name} (process {self.pid}) does not end")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)


class Engine(Process):
    """An engine (engine.py)."""

    def begin(self, do: str, **arguments: object) -> None:
        """Asks, without waiting for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do} | arguments) + "\n")
        self.process.stdin.flush()

    def end(self, deadline: Deadline, seconds: float = 30.0) -> dict[str, Any]:
        """The answer; raises `EngineError` for an error."""
        told = self.answer(min(deadline.left(), seconds))
        if "error" in told:
            raise EngineError(f"{self.name}: {told['error']}: {told['text']}")
        return told

    def ask(self, deadline: Deadline, do: str, **arguments: object) -> dict[str, Any]:
        """Asks, and waits for the answer."""
        self.begin(do, **arguments)
        return self.end(deadline)


class Node(Process):
    """A node, with the sockets of its tenant in a folder of its own."""

    def __init__(self, rig: "Rig", name: str, arena: str, sections: str = "") -> None:
        self.folder = rig.scratch / name
        self.folder.mkdir(exist_ok=True)
        self.socket = str(self.folder / "default.sock")
        config = self.folder / "node.toml"
        config.write_text(
            f'{sections}\n[http]\nlisten = "127.0.0.1:0"\n[host]\narena_bytes = "{arena}"\n'
            f'[[tenants]]\nname = "default"\nsocket = "{self.socket}"\n'
        )
        command = [str(rig.larder), "node", "--config", str(config)]
        super().__init__(name, command, self.folder / "node.log", os.environ | rig.environment)

    def until_ready(self, deadline: Deadline) -> "Node":
        """Waits until it serves."""
        self.http = self.answer(min(deadline.left(), 10.0))["http"]
        return self

    def metric(self, name: str) -> dict[str, float]:
        """The samples of a metric that are not 0, by their labels."""
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=2) as answer:
            lines = answer.read().decode().splitlines()
        samples = (line.removeprefix(name).rpartition(" ") for line in lines if line.startswith((f"{name}{{", f"{name} ")))
        return {labels: float(value) for labels, _, value in samples if float(value) != 0}

    def warnings(self) -> list[str]:
        """The warnings and errors in its log."""
        return [line for line in self.log().splitlines() if " WARN " in line or " ERROR " in line]


class Spares:
    """Engines that have loaded PyTorch and touch no GPU yet: loading takes seconds."""

    def __init__(self, rig: "Rig", count: int, **environment: str) -> None:
        self._rig, self._environment = rig, environment
        self._made = 0
        self._ready: list[Engine] = []
        self._waiting = [self._start() for _ in range(count)]

    def until_ready(self, deadline: Deadline) -> None:
        """Waits until all have loaded PyTorch."""
        while self._waiting:
            self._waiting[0].answer(deadline.left())
            self._ready.append(self._waiting.pop(0))

    def take(self, name: str, deadline: Deadline) -> Engine:
        """An engine that is ready."""
        if self._ready:
            engine = self._ready.pop(0)
        else:
            engine = self._waiting.pop(0) if self._waiting else self._start()
            engine.answer(deadline.left())
        engine.name = name
        return engine

    def close(self) -> None:
        """Ends those that were not taken."""
        for engine in self._ready + self._waiting:
            engine.kill()

    def _start(self) -> Engine:
        self._made += 1
        log = self._rig.scratch / f"engine-{self._made}-{len(self._environment)}.log"
        command = [sys.executable, str(HERE / "engine.py"), *(["--fake"] if self._rig.fake else [])]
        return Engine(log.stem, command, log, os.environ | self._rig.environment | self._environment)


P = TypeVar("P", bound=Process)


class Card:
    """The used memory of the GPU, from the driver's management library, which makes no context. Over the stand-in for the driver:
    the memory of engines that nodes have mapped."""

    def __init__(self, fake: bool) -> None:
        self._nodes: list[Node] = []
        self._fake = fake
        self._library: ctypes.CDLL | None = None
        if not fake:
            try:
                self._open()
            except (OSError, RuntimeError) as error:
                say(f"the card's memory is read by a process of its own each time: {error}")
                self._library = None

    def watch(self, node: Node) -> None:
        """Counts what this node has mapped."""
        self._nodes.append(node)

    def used(self) -> int:
        """Bytes used by all processes."""
        if self._fake:
            return sum(mapped(node.pid) for node in self._nodes if node.is_alive())
        if self._library is None:
            return int(subprocess.run([sys.executable, "-c", PROBE], capture_output=True, check=True, timeout=10).stdout)
        values = (ctypes.c_ulonglong * 3)()
        self._check("nvmlDeviceGetMemoryInfo", self._device, ctypes.byref(values))
        return int(values[2])

    def _open(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._library.nvmlDeviceGetHandleByIndex_v2.argtypes = (ctypes.c_uint, ctypes.c_void_p)
        self._library.nvmlDeviceGetMemoryInfo.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._device = ctypes.c_void_p()
        self._check("nvmlInit_v2")
        self._check("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(self._device))
        self.used()

    def _check(self, name: str, *arguments: object) -> None:
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name} failed ({result})")


PROBE = """
import ctypes
driver, context, free, total = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
driver.cuInit(0) and exit(1)
driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) and exit(2)
driver.cuCtxSetCurrent(context) and exit(3)
driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) and exit(4)
print(total.value - free.value)
"""
"""Prints the used bytes of the first GPU, its own context among them."""


def mapped(pid: int) -> int:
    """Bytes of engines' shared memory that a process has mapped."""
    total = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memfd:faults-engine" in line:
            start, end = (int(place, 16) for place in line.split()[0].split("-"))
            total += end - start
    return total


class Report:
    """What was found: checks that passed or failed, and values. Written to a file after each step."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.rows: list[dict[str, Any]] = []

    def add(self, step: str, what: str, verdict: str, detail: object = "") -> None:
        """Adds a row, and says it."""
        self.rows.append({"step": step, "what": what, "verdict": verdict, "detail": detail, "at": time.monotonic() - STARTED})
        say(f"{verdict:6} {what}: {detail}" if detail != "" else f"{verdict:6} {what}")
        if self._file is not None:
            self._file.write_text(json.dumps(self.rows, indent=1, default=str) + "\n")

    @property
    def failed(self) -> int:
        """The number of checks that failed."""
        return sum(row["verdict"] == "FAILED" for row in self.rows)

    def table(self) -> None:
        """Prints all rows."""
        print(flush=True)
        for row in self.rows:
            print(f"{row['step']:2} {row['verdict']:6} {row['what']}  {row['detail']}")
        checks = sum(row["verdict"] in ("ok", "FAILED") for row in self.rows)
        print(f"{checks} checks, {self.failed} failed, {time.monotonic() - STARTED:.1f} s", flush=True)


class Rig:
    """All processes of a run."""

    def __init__(self, larder: Path, fake: bool, report: Report) -> None:
        self.larder, self.fake, self.report = larder.resolve(), fake, report
        self.scratch = Path(tempfile.mkdtemp(prefix="larder-faults-"))
        self.environment = {"LARDER_LOG": "info", "PYTHONDONTWRITEBYTECODE": "1"}
        if fake:
            self.environment["LD_LIBRARY_PATH"] = str(stand_in(self.scratch))
        self.card = Card(fake)
        self.at_start = self.card.used()
        self.tolerance = 0 if fake else 16 * MIB
        self.spares: Spares | None = None
        self.expandable: Spares | None = None
        self._running: list[Process] = []
        self._is_over = False
        self.step, self.deadline = "", Deadline(60)

    def start_spares(self, count: int, expandable: int, seconds: float) -> None:
        """Starts engines ahead of their use, and waits for them at most these seconds."""
        setting = "expandable_segments:True"
        self.spares = Spares(self, count)
        self.expandable = Spares(self, expandable, PYTORCH_CUDA_ALLOC_CONF=setting, PYTORCH_ALLOC_CONF=setting)
        deadline = Deadline(seconds)
        for spares in (self.spares, self.expandable):
            spares.until_ready(deadline)

    def engine(self, name: str, *, expandable: bool = False) -> Engine:
        """An engine that is ready."""
        spares = self.expandable if expandable else self.spares
        assert spares is not None
        return self._runs(spares.take(name, self.deadline))

    def node(self, name: str, arena: str, sections: str = "") -> Node:
        """A node that serves."""
        node = self._runs(Node(self, name, arena, sections))
        self.card.watch(node)
        return node.until_ready(self.deadline)

    def _runs(self, process: P) -> P:
        self._running.append(process)
        if self._is_over:
            process.kill()
            raise OutOfTime("the program ends")
        return process

    def check(self, what: str, is_right: bool, detail: object = "") -> None:
        """Adds a check to the report."""
        self.report.add(self.step, what, "ok" if is_right else "FAILED", detail)

    def note(self, what: str, detail: object) -> None:
        """Adds a value to the report."""
        self.report.add(self.step, what, "note", detail)

    def settles(self, bytes_before: int, seconds: float = 5.0) -> tuple[bool, str]:
        """Whether the card's used memory comes back to a value, and the difference."""
        start = time.monotonic()
        came = self.deadline.until(lambda: abs(self.card.used() - bytes_before) <= self.tolerance, seconds)
        more = (self.card.used() - bytes_before) / MIB
        return came, f"{more:+.0f} MiB after {time.monotonic() - start:.1f} s"

    def end_step(self) -> None:
        """Kills the step's processes; then the card's memory must be as at the start."""
        nodes = {process.folder: process for process in self._running if isinstance(process, Node)}
        for process in self._running:
            process.process.kill()
        for process in self._running:
            process.kill()
        self._running = []
        self.deadline = Deadline(8)
        self.check("the card's memory is free after all have ended", *self.settles(self.at_start))
        for node in nodes.values():
            for line in sorted(set(node.warnings()))[:4]:
                self.note(f"the log of {node.name}", line[:300])

    def kill_all(self) -> None:
        """Kills all processes, and those that start later."""
        self._is_over = True
        for process in list(self._running):
            process.process.kill()
        for spares in (self.spares, self.expandable):
            if spares is not None:
                spares.close()

    def close(self) -> None:
        """Ends everything."""
        self.kill_all()
        shutil.rmtree(self.scratch, ignore_errors=True)


def stand_in(folder: Path) -> Path:
    """Builds the stand-in for CUDA's driver; returns the folder with it."""
    library = folder / "driver"
    library.mkdir()
    flags = ["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1"]
    source = ROOT / "client/device/fake/libcuda.c"
    subprocess.run(["gcc", *flags, "-o", str(library / "libcuda.so.1"), str(source)], check=True)
    (library / "libcuda.so").symlink_to("libcuda.so.1")
    return library
