"""An engine for the faults: answers each line of JSON with a line of JSON. With --fake its memory is the host's."""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import larder_kv
from lane import COPY_SECONDS, Lane, Stream
from memory import POISON, Driver, DriverError, GpuMemory, HostMemory, Memory, PieceMemory, Shape, torch
from own import WINDOW_BYTES, Computation, Idle, OwnCopies, rates_while

TORMENT_SECONDS = 15.0

T = TypeVar("T")


class Engine:
    """The commands of an engine. Each public method is one; its result is the answer."""

    def __init__(self, fake: bool) -> None:
        self._fake = fake
        self._memory: Memory | None = None
        self._lane: Lane | None = None
        self._stream: Stream | None = None
        self._ballast: list[Any] = []
        self._gpu: larder_kv.Gpu | None = None
        self._session: larder_kv.Session | None = None
        self._own: list[OwnCopies] = []
        self._computation: Computation | Idle | None = None

    def allocate(self, shape: dict[str, int]) -> dict[str, Any]:
        """Takes the KV memory."""
        self._memory = HostMemory(Shape(**shape)) if self._fake else GpuMemory(Shape(**shape))
        return {"bytes": self._memory.shape.size}

    def expand(self, shape: dict[str, int], size: int) -> dict[str, Any]:
        """Takes memory of PyTorch's expandable segments, and tells how it can be shared. The KV memory is one piece of it."""
        whole = torch.full((size,), POISON, dtype=torch.uint8, device="cuda")
        driver, start = Driver(), int(whole.data_ptr())
        segments = torch.cuda.memory_snapshot()
        told: dict[str, Any] = {"address range": [start - driver.range_of(start)[0], driver.range_of(start)[1]]}
        told["PyTorch calls them expandable"] = [segment.get("is_expandable") for segment in segments]
        told["cuIpcGetMemHandle"] = outcome(lambda: driver.ipc_handle(driver.range_of(start)[0]).hex()[:16])
        told["pieces"] = pieces = outcome(lambda: driver.pieces(start, start + size))
        if isinstance(pieces, str):
            return told
        told["pieces"] = [size for _, size in pieces]
        told["made for"] = outcome(lambda: driver.exportable_as(start))
        address, bytes_of_piece = next((piece for piece in pieces[1:-1]), pieces[0])
        told["exported"] = outcome(lambda: driver.try_export(address))
        # A piece at an end may reach beyond the tensor.
        if told["exported"] == "yes" and len(pieces) > 2:
            self._memory = PieceMemory(Shape(**shape), whole, address, bytes_of_piece)
            told["pages"] = self._memory.shape.pages
        return told

    def connect(self, socket: str, verify: bool = True) -> dict[str, Any]:
        """Opens a session, and makes the memory known to the node."""
        if self._lane is not None:
            self._lane.session.close()
        self._lane = Lane(socket, self.memory, verify=verify)
        return {"node": self._lane.session.node}

    def save(self, number: int, pages: list[int]) -> dict[str, Any]:
        """Writes random bytes and saves them."""
        self.memory.write(pages, number)
        self.lane.save(number, pages)
        return {}

    def load(self, number: int, pages: list[int]) -> dict[str, Any]:
        """Loads what any engine has saved into poisoned memory; whether the bytes are right, and no others were written."""
        self.memory.poison()
        self.lane.load(number, pages)
        return {"right": self.memory.holds(pages, number), "untouched": self.memory.is_poisoned(pages)}

    def stream(self, chunks: int, first: int) -> dict[str, Any]:
        """Begins verified copies in the background."""
        self._stream = Stream(self.lane, self.memory, chunks, first)
        return {}

    def streamed(self, stop: bool = False) -> dict[str, Any]:
        """How the copies in the background went."""
        assert self._stream is not None
        return self._stream.stop() if stop else self._stream.told()

    def torment(self, phase: str, socket: str, first: int, chunks: int) -> dict[str, Any]:
        """Does one thing again and again until it fails, or this process is killed."""
        half = chunks * self.memory.shape.pages_per_chunk
        pages, number = list(range(half)), first
        if phase == "loads":
            self.lane.save(first, pages)
        say({"began": phase})
        end = time.monotonic() + TORMENT_SECONDS
        while time.monotonic() < end:
            try:
                if phase == "registrations":
                    self.connect(socket)
                elif phase == "saves":
                    self.lane.save(number, pages)
                else:
                    self.lane.load(first, pages)
            except Exception as error:  # noqa: BLE001
                return {"rounds": number - first} | described(error)
            number += 1
        return {"rounds": number - first}

    def product(self) -> dict[str, Any]:
        """Whether this process still computes: a matrix product of small whole numbers, which is exact."""
        if self._fake:
            return {"right": True}
        left, right = (torch.randint(0, 4, (512, 512), device="cuda").float() for _ in range(2))
        exact = left.cpu().double() @ right.cpu().double()
        return {"right": bool(torch.equal((left @ right).cpu().double(), exact))}

    def share(self) -> dict[str, Any]:
        """The memory's handle, for others to misuse."""
        shared = self.memory.shared()
        if isinstance(shared, larder_kv.IpcMemory):
            return {"handle": shared.handle.hex(), "offset": shared.offset, "size": shared.size}
        os.close(shared.descriptor)
        return {"handle": self.memory.address().to_bytes(64, "little").hex(), "offset": 0, "size": shared.size}

    def misuse(self, handle: str, offset: int, size: int) -> dict[str, Any]:
        """Registers memory by any handle: the refusal, or that there was none."""
        try:
            self.lane.register(larder_kv.IpcMemory(bytes.fromhex(handle), offset, size))
        except Exception as error:  # noqa: BLE001
            return described(error)
        return {}

    def own_but_false(self, offset: int, more: int) -> dict[str, Any]:
        """Registers the own memory with a false offset and size."""
        shared = self.memory.shared()
        if isinstance(shared, larder_kv.IpcMemory):
            return self.misuse(shared.handle.hex(), shared.offset + offset, shared.size + more)
        try:
            self.lane.register(replace(shared, size=shared.size + offset + more))
        except Exception as error:  # noqa: BLE001
            return described(error)
        return {}

    def free_under_copies(self, first: int, chunks: int, loads: int, saves: int) -> dict[str, Any]:
        """Frees the memory while copies touch it, and takes new memory, which no copy may touch."""
        assert self._memory is not None
        shape, half = self._memory.shape, chunks * self._memory.shape.pages_per_chunk
        self.save(first, list(range(half)))
        copies = [self.lane.begin_load(first, range(half, 2 * half)) for _ in range(loads)]
        begun = [self.lane.begin_save(first + 1 + number, range(half)) for number in range(saves)]
        copies += [copy for _, copy in begun]
        running = self._running(copies)
        start = time.monotonic()
        self._memory.free()
        seconds = time.monotonic() - start
        self.allocate(vars(shape))
        running_still = self._running(copies)
        ends = [self.lane.session.wait_for_copy(copy, seconds=COPY_SECONDS).end for copy in copies]
        told = {end or "none": ends.count(end) for end in set(ends)}
        told["under way when freed"] = running
        told["under way with the new memory"] = running_still
        return {"ends": told, "seconds of free": seconds, "untouched": self._memory.is_poisoned()}

    def _running(self, copies: Sequence[larder_kv.NodeCopy]) -> int:
        """How many copies have not ended."""
        return sum(self.lane.session.wait_for_copy(copy, seconds=0.0).end is None for copy in copies)

    def loads(self, numbers: list[int], chunks: int, times: int) -> dict[str, Any]:
        """Loads prompts, all at once, several times, and verifies the bytes: each time the tiers before, and the rate."""
        half, told, right = chunks * self.memory.shape.pages_per_chunk, [], True
        places = [list(range(at * half, (at + 1) * half)) for at in range(len(numbers))]
        for _ in range(times):
            self.memory.poison()
            tiers = [self.lane.tiers(number, chunks) for number in numbers]
            start = time.perf_counter()
            copies = [self.lane.begin_load(number, pages) for number, pages in zip(numbers, places, strict=True)]
            for copy in copies:
                self.lane.until_done(copy)
            seconds = time.perf_counter() - start
            told.append([tiers, len(numbers) * chunks * self.memory.shape.chunk_bytes / seconds / 1e9])
            right &= all(self.memory.holds(pages, number) for number, pages in zip(numbers, places, strict=True))
        return {"loads": told, "right": right}

    def hog(self, leave: int) -> dict[str, Any]:
        """Takes the GPU's memory except `leave` bytes."""
        if self._fake:
            return {"bytes": 0}
        # What PyTorch keeps for later tensors stays: the engine needs it to compare bytes.
        free, _ = torch.cuda.mem_get_info()
        self._ballast.append(torch.empty(max(free - leave, 0), dtype=torch.uint8, device="cuda"))
        return {"bytes": max(free - leave, 0), "free": torch.cuda.mem_get_info()[0]}

    def own(self, socket: str, shapes: list[dict[str, int]], chunks: int) -> dict[str, Any]:
        """Prepares copies in this process, for each shape; whether the bytes are right."""
        self._gpu = self._gpu or larder_kv.Gpu()
        self._own = []
        self._session = larder_kv.Session(socket, verify="off", window_bytes=WINDOW_BYTES)
        right = []
        for shape in shapes:
            memory: Memory = HostMemory(Shape(**shape)) if self._fake else GpuMemory(Shape(**shape))
            self._own.append(OwnCopies(self._gpu, self._session, memory, chunks))
            right.append(self._own[-1].prepare())
        pins = 1 if self._fake else Driver().attribute(113)
        return {"right": right, "pins read-only memory": pins, "window": self._session.window_bytes}

    def rates(self, number: int, seconds: float) -> dict[str, Any]:
        """GB/s of the copies of a shape, without a computation: each direction alone, then both at once. And what the
        copies alone reach, without the requests around them."""
        own = self._own[number]
        told: dict[str, Any] = {}
        for way, copy in (("load", own.load), ("save", own.save)):
            # The first saves pin the node's memory.
            rates_while([copy], lambda: time.sleep(seconds / 2))
            own.copied[way] = (0, 0.0)
            (told[way],) = rates_while([copy], lambda: time.sleep(seconds))
            size, of_copies = own.copied[way]
            told[f"{way} without requests"] = size / max(of_copies, 1e-9) / 1e9
        return told | {"both": rates_while([own.load, own.save], lambda: time.sleep(seconds))}

    def yardstick(self, size: int) -> dict[str, Any]:
        """GB/s of PyTorch's copies of pinned memory: to the GPU, from it, and both at once."""
        if self._fake:
            return {"load": 1.0, "save": 1.0, "both": [1.0, 1.0]}
        host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        device = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
        streams = [torch.cuda.Stream() for _ in range(2)]

        def copies(to_device: bool, from_device: bool) -> float:
            start = time.perf_counter()
            with torch.cuda.stream(streams[0]):
                if to_device:
                    device[0].copy_(host[0], non_blocking=True)
            with torch.cuda.stream(streams[1]):
                if from_device:
                    host[1].copy_(device[1], non_blocking=True)
            for stream in streams:
                stream.synchronize()
            return time.perf_counter() - start

        def rate(to_device: bool, from_device: bool) -> float:
            return size / min(copies(to_device, from_device) for _ in range(4)) / 1e9

        return {"load": rate(True, False), "save": rate(False, True), "both": [rate(True, True)] * 2}

    def beside(self, number: int, kind: str, groups: int) -> dict[str, Any]:
        """The time of a matrix product alone and with copies beside, and the rates of these copies."""
        own = self._own[number]
        kinds = {
            "loads": [own.load],
            "saves": [own.save],
            "loads and saves": [own.load, own.save],
            "loads layer by layer": [own.load_layers],
            "saves layer by layer": [own.save_layers],
        }
        if self._computation is None:
            self._computation = Idle() if self._fake else Computation()
        computation, copies = self._computation, kinds[kind]
        # The first saves pin the node's memory.
        alone = rates_while(copies, lambda: time.sleep(0.03 * groups))
        together: list[float] = []
        before = computation.milliseconds(groups)
        rates = rates_while(copies, lambda: together.append(computation.milliseconds(groups)))
        after = computation.milliseconds(groups)
        return {"alone": [before, after], "together": together[0], "rates": rates, "rates alone": alone}

    def choices(self) -> dict[str, Any]:
        """How copies are made in this process."""
        return {"choices": self._gpu.choices() if self._gpu else []}

    @property
    def memory(self) -> Memory:
        """The KV memory."""
        assert self._memory is not None, "no memory was allocated"
        return self._memory

    @property
    def lane(self) -> Lane:
        """The session."""
        assert self._lane is not None, "not connected"
        return self._lane


def outcome(action: Callable[[], T]) -> T | str:
    """The result of a call of the driver, or its refusal."""
    try:
        return action()
    except DriverError as error:
        return str(error)


def described(error: BaseException) -> dict[str, Any]:
    """An error as an answer."""
    return {"error": type(error).__name__, "text": str(error)[:400], "code": getattr(error, "code", None)}


def say(answer: dict[str, Any]) -> None:
    """Answers."""
    print(json.dumps(answer), flush=True)


def main() -> None:
    """Answers commands until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fake", action="store_true")
    fake = parser.parse_args().fake
    engine = Engine(fake)
    say({"ready": os.getpid()})
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            say(getattr(engine, asked.pop("do"))(**asked))
        except BaseException as error:  # noqa: BLE001
            say(described(error))


if __name__ == "__main__":
    main()
