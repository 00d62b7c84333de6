"""What the faults are made with: engines that have loaded PyTorch ahead, the card's memory, and all processes of a run."""

import ctypes
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from processes import ROOT, Node, OutOfTime, Process, Report, say, wait_until  # noqa: E402

MIB = 1 << 20


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
        return wait_until(condition, min(self._end, time.monotonic() + seconds))


class Engine(Process):
    """An engine (engine.py)."""

    def begin(self, do: str, **arguments: object) -> None:
        """Asks, without waiting for the answer."""
        self.write({"do": do} | arguments)

    def end(self, deadline: Deadline, seconds: float = 30.0) -> dict[str, Any]:
        """The answer; raises `EngineError` for an error."""
        return self.told(min(deadline.left(), seconds))

    def ask(self, deadline: Deadline, do: str, **arguments: object) -> dict[str, Any]:
        """Asks, and waits for the answer."""
        self.begin(do, **arguments)
        return self.end(deadline)


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
        return Engine(command, log, self._rig.environment | self._environment)


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
            return sum(mapped(node.process.pid) for node in self._nodes if node.is_alive())
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


class Rig:
    """All processes of a run."""

    def __init__(self, larder: Path, fake: bool, report: Report) -> None:
        self.larder, self.fake, self.report = larder.resolve(), fake, report
        self.scratch = Path(tempfile.mkdtemp(prefix="larder-faults-"))
        self.environment = {"PYTHONDONTWRITEBYTECODE": "1"}
        if fake:
            self.environment["LD_LIBRARY_PATH"] = str(stand_in(self.scratch))
        self.card = Card(fake)
        self.at_start = self.card.used()
        self.tolerance = 0 if fake else 16 * MIB
        self.spares: Spares | None = None
        self.expandable: Spares | None = None
        self._running: list[Process] = []
        self._is_over = False
        self.deadline = Deadline(60)

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
        node = self._runs(Node(self.larder, self.scratch / name, self.environment, arena, sections))
        self.card.watch(node)
        node.until_ready(min(self.deadline.left(), 10.0))
        return node

    def _runs(self, process: P) -> P:
        self._running.append(process)
        if self._is_over:
            process.kill()
            raise OutOfTime("the program ends")
        return process

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
            process.kill_only()
        for process in self._running:
            process.kill()
        self._running = []
        self.deadline = Deadline(8)
        self.report.check("the card's memory is free after all have ended", *self.settles(self.at_start))
        for node in nodes.values():
            for line in sorted(set(warnings(node)))[:4]:
                self.report.note(f"the log of {node.folder.name}", line[:300])

    def kill_all(self) -> None:
        """Kills all processes, and those that start later."""
        self._is_over = True
        for process in list(self._running):
            process.kill_only()
        for spares in (self.spares, self.expandable):
            if spares is not None:
                spares.close()

    def close(self) -> None:
        """Ends everything."""
        self.kill_all()
        shutil.rmtree(self.scratch, ignore_errors=True)


def warnings(node: Node) -> list[str]:
    """The warnings and errors in a node's log."""
    return [line for line in node.log().splitlines() if " WARN " in line or " ERROR " in line]


def stand_in(folder: Path) -> Path:
    """Builds the stand-in for CUDA's driver; returns the folder with it."""
    library = folder / "driver"
    library.mkdir()
    flags = ["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1"]
    source = ROOT / "client/device/fake/libcuda.c"
    subprocess.run(["gcc", *flags, "-o", str(library / "libcuda.so.1"), str(source)], check=True)
    (library / "libcuda.so").symlink_to("libcuda.so.1")
    return library
