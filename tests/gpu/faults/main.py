"""Faults beside copies of GPU memory: engines and nodes are killed, memory is freed under a copy, handles are false, the device
tier gets no memory. And rates: the device tier, and copies in an engine's process beside its computation.

    tests/gpu/run faults           on a machine with a GPU, PyTorch and larder_kv
    tests/gpu/run faults --fake    small, over the stand-in for CUDA's driver, no speed

A check that fails is reported, and the rest goes on. The exit status is 1 if any check failed.
"""

import random
import sys
import time
from collections.abc import Callable
from typing import Any

from rig import MIB, Deadline, Engine, Rig

from processes import STARTED, Died, EngineError, Node, OutOfTime, Report, end_after, missing, options_of, run_step, say

GIB = 1 << 30
KILLS = 2
COPIES_BESIDE = ("loads", "saves", "loads and saves", "loads layer by layer", "saves layer by layer")
PHASES = ("registrations", "saves", "loads")


class Sizes:
    """The sizes of a run."""

    def __init__(self, fake: bool) -> None:
        page = 4 << 10 if fake else 64 << 10
        self.fake = fake
        self.arena = "64MiB" if fake else "2GiB"
        self.shape = {"layers": 4, "pages": 64, "page_bytes": page, "pages_per_chunk": 4}
        """Of engines that copy: chunks of 1 MiB."""
        self.large = self.shape | {"pages": 1024 if fake else 2048}
        """Of an engine that frees its memory: 512 MiB."""
        self.stream_chunks, self.torment_chunks = 6, 8
        self.long_chunks, self.long_copies = (128, 4) if fake else (256, 10)
        self.tier_chunks = 128 if fake else 256
        layers = 4 if fake else 32
        self.tier_shape = {"layers": layers, "pages": 2 * self.tier_chunks, "page_bytes": page, "pages_per_chunk": 1}
        self.tier_bytes = 2 * self.tier_chunks * layers * page
        """Room for two of the three prompts."""
        self.own_chunks = 32 if fake else 64
        self.own_seconds = 0.05 if fake else 0.35
        self.groups = 3 if fake else 11
        self.own_shapes = self._own_shapes()

    def _own_shapes(self) -> dict[str, dict[str, int]]:
        """Chunks of 2 MiB each (over the stand-in of 128 KiB), by the size of their pages."""
        chunk = 128 << 10 if self.fake else 2 * MIB
        kinds = [(16, 32, 4), (64, 32, 1), (256, 8, 1), (2048, 1, 1)]
        shapes = {}
        for kib, layers, pages in kinds:
            shape = {"layers": layers, "page_bytes": chunk // layers // pages, "pages_per_chunk": pages}
            shapes[f"pages of {kib} KiB"] = shape | {"pages": 2 * self.own_chunks * pages}
        return shapes


class Faults:
    """The steps."""

    def __init__(self, rig: Rig, sizes: Sizes, seed: int) -> None:
        self.rig, self.sizes, self.random = rig, sizes, random.Random(seed)

    def there_and_back(self) -> None:
        """An engine's pages come back in another engine's other pages, whatever PyTorch's allocator."""
        node = self.rig.node("node", self.sizes.arena)
        first, second = self.rig.engine("A"), self.rig.engine("B")
        for engine in (first, second):
            engine.begin("allocate", shape=self.sizes.shape)
        for engine in (first, second):
            engine.end(self.rig.deadline)
            engine.ask(self.rig.deadline, "connect", socket=node.socket)
        pages = self._some(16)
        first.ask(self.rig.deadline, "save", number=1, pages=pages)
        self._loads(second, "pages of engine A, loaded by engine B", 1, self._some(16))
        self._loads(first, "pages of engine A, loaded by itself", 1, self._some(16))
        if not self.rig.fake:
            self._expandable(node)

    def _expandable(self, node: Node) -> None:
        """What the driver says to expandable segments, and copies of one piece there and back."""
        engines = [self.rig.engine(f"expandable {name}", expandable=True) for name in "AB"]
        usable = []
        for engine in engines:
            told = engine.ask(self.rig.deadline, "expand", shape=self.sizes.shape, size=128 * MIB)
            if engine is engines[0]:
                for what, answer in told.items():
                    self.rig.report.note(f"expandable segments: {what}", answer)
            usable.append(told.get("pages", 0))
        if not all(usable):
            self.rig.report.check("a piece of an expandable segment can be shared by descriptor", False, "see above")
            return
        for engine in engines:
            engine.ask(self.rig.deadline, "connect", socket=node.socket)
        half = usable[0] // 8 * 4
        engines[0].ask(self.rig.deadline, "save", number=2, pages=list(range(half)))
        self._loads(engines[1], "a piece of an expandable segment, loaded by another engine", 2, list(range(half, 2 * half)))

    def engine_killed(self) -> None:
        """Engines are killed at random moments beside an engine that goes on."""
        node, worker = self._worker(first=1_000)
        before = self.rig.card.used()
        for number in range(KILLS * len(PHASES)):
            phase = PHASES[number % len(PHASES)]
            victim = self.rig.engine(f"victim {number}")
            victim.ask(self.rig.deadline, "allocate", shape=self.sizes.shape)
            victim.ask(self.rig.deadline, "connect", socket=node.socket)
            rounds = self._rounds(worker)
            seconds = self._torment(victim, phase, node.socket, first=10_000 * (number + 1))
            time.sleep(seconds)
            victim.kill()
            came, difference = self.rig.settles(before)
            what = f"engine killed {seconds * 1e3:.0f} ms into {phase}: its memory is free"
            self.rig.report.check(what, came, f"{difference}; the other engine's rounds meanwhile: {self._rounds(worker) - rounds}")
        self._worker_ends(worker, node)
        self.rig.report.note("copies at the node, by their end", node.metric("larder_device_copies_total"))

    def node_killed(self) -> None:
        """The node is killed at random moments: the engine lives, and a new node serves it."""
        engine = self.rig.engine("survivor")
        engine.ask(self.rig.deadline, "allocate", shape=self.sizes.shape)
        for number in range(KILLS * len(PHASES)):
            phase = PHASES[number % len(PHASES)]
            node = self.rig.node("node", self.sizes.arena)
            engine.ask(self.rig.deadline, "connect", socket=node.socket)
            engine.ask(self.rig.deadline, "save", number=1, pages=list(range(16)))
            self._loads(engine, f"copies with node {number + 1}", 1, list(range(16, 32)))
            seconds = self._torment(engine, phase, node.socket, first=10_000)
            time.sleep(seconds)
            killed = time.monotonic()
            node.kill()
            told = engine.answer(min(self.rig.deadline.left(), 12.0))
            what = f"node killed {seconds * 1e3:.0f} ms into {phase}: the engine gets an error of Larder's"
            names = ("EndedError", "ConnectError", "CopyFailed")
            error = f"{told.get('error')}: {told.get('text')}"
            when = f"after {time.monotonic() - killed:.2f} s, {told.get('rounds')} rounds"
            self.rig.report.check(what, told.get("error") in names, f"{error} ({when})")
            self.rig.report.check("the engine still computes", engine.ask(self.rig.deadline, "product")["right"])

    def false_handles(self) -> None:
        """Handles of dead engines, handles with false sizes and random handles are refused."""
        node, dead = self.rig.node("node", self.sizes.arena), self.rig.engine("dead")
        engine = self.rig.engine("alive")
        for one in (dead, engine):
            one.ask(self.rig.deadline, "allocate", shape=self.sizes.shape)
        engine.ask(self.rig.deadline, "connect", socket=node.socket)
        engine.ask(self.rig.deadline, "save", number=1, pages=list(range(16)))
        handle = dead.ask(self.rig.deadline, "share")
        dead.kill()
        noise = {"handle": self.random.randbytes(64).hex(), "offset": 0, "size": handle["size"]}
        altered = bytearray.fromhex(handle["handle"])
        altered[self.random.randrange(8)] ^= 0xFF
        tries: list[tuple[str, str, dict[str, Any]]] = [
            ("the handle of a dead engine", "misuse", handle),
            ("the own memory, 1 GiB too long", "own_but_false", {"offset": 0, "more": GIB}),
            ("the own memory at an offset beyond it", "own_but_false", {"offset": GIB, "more": 0}),
            ("the handle of a dead engine, altered", "misuse", handle | {"handle": altered.hex()}),
            ("a handle of zeros", "misuse", noise | {"handle": bytes(64).hex()}),
            ("a handle of random bytes", "misuse", noise),
        ]
        for what, do, arguments in tries:
            engine.begin(do, **arguments)
            told = engine.answer(min(self.rig.deadline.left(), 12.0))
            refusal = f"{told.get('error')}, {told.get('code')}: {told.get('text')}"
            self.rig.report.check(f"{what} is refused", told.get("error") == "RefusedError" and told.get("code") == "device", refusal)
            lives = self._lives(node, has_failed=told.get("error") == "EndedError")
            self.rig.report.check(f"the node lives after {what}", lives, "" if lives else node.log_end())
            if not lives:
                node = self.rig.node("node", self.sizes.arena)
                engine.ask(self.rig.deadline, "connect", socket=node.socket)
                engine.ask(self.rig.deadline, "save", number=1, pages=list(range(16)))
            self._loads(engine, f"copies after {what}", 1, list(range(16, 32)))

    def freed_under_copies(self) -> None:
        """Memory is freed while copies touch it: no other memory is touched."""
        node, worker = self._worker(first=1_000)
        before = self.rig.card.used()
        engine = self.rig.engine("frees")
        engine.ask(self.rig.deadline, "allocate", shape=self.sizes.large)
        engine.ask(self.rig.deadline, "connect", socket=node.socket, verify=False)
        rounds = self._rounds(worker)
        copies = {"loads": self.sizes.long_copies, "saves": 2}
        told = engine.ask(self.rig.deadline, "free_under_copies", first=50_000, chunks=self.sizes.long_chunks, **copies)
        self.rig.report.check("memory freed under copies: new memory is untouched", told.pop("untouched"), told)
        self.rig.report.check("the engine that freed it still computes", engine.ask(self.rig.deadline, "product")["right"])
        self.rig.report.note("used by the card's memory that the engine has freed", f"{(self.rig.card.used() - before) / MIB:+.0f} MiB")
        engine.kill()
        self.rig.report.check("its memory is free after its end", *self.rig.settles(before))
        self.rig.report.note("the other engine's rounds meanwhile", self._rounds(worker) - rounds)
        self._worker_ends(worker, node)

    def device_tier(self) -> None:
        """Loads from the host, promotion while loads run, loads from the device tier, and a GPU without room for the tier."""
        sizes, chunks = self.sizes, self.sizes.tier_chunks
        arena = sizes.arena if self.rig.fake else "3GiB"
        node = self.rig.node("node", arena, f"[gpu]\ndevice_bytes = {sizes.tier_bytes}")
        engine = self.rig.engine("loads")
        engine.ask(self.rig.deadline, "allocate", shape=sizes.tier_shape)
        engine.ask(self.rig.deadline, "connect", socket=node.socket, verify=False)
        for number in range(3):
            engine.ask(self.rig.deadline, "save", number=number, pages=list(range(chunks)))
        told = self._tier_loads(engine, "one prompt, loaded again and again", [0], 8)
        self._tier_rates(told["loads"], chunks)
        self._tier_loads(engine, "two prompts at once: one in the tier, the other promoted while loads run", [0, 1], 8)
        self._tier_loads(engine, "a third prompt, for which the tier evicts", [2], 5)
        self.rig.report.note("blocks evicted from the tier", node.metric("larder_device_evicted_blocks_total"))
        self.rig.report.note("bytes copied", node.metric("larder_device_copied_bytes_total"))
        node.kill()
        self._tier_without_room(engine, arena)

    def _tier_without_room(self, engine: Engine, arena: str) -> None:
        chunks, fake = self.sizes.tier_chunks, self.rig.fake
        node = self.rig.node("crowded", arena, f'[gpu]\ndevice_bytes = "{"1GiB" if fake else "64GiB"}"')
        self.rig.report.note("an engine takes the card's memory", engine.ask(self.rig.deadline, "hog", leave=2 * GIB))
        engine.ask(self.rig.deadline, "connect", socket=node.socket, verify=False)
        engine.ask(self.rig.deadline, "save", number=0, pages=list(range(chunks)))
        self._tier_loads(engine, "no room for the tier: loads from the host", [0], 5)
        said = "no memory for the device tier" in node.log()
        self.rig.report.check("the node logs that the GPU has no memory for the tier", said or fake, "no such GPU" if fake else "")
        self.rig.report.check("the node lives", node.is_alive())

    def beside_computation(self) -> None:
        """Copies in the engine's process: their rates, and what they take from a matrix product."""
        sizes, engine = self.sizes, self.rig.engine("computes")
        shapes = list(sizes.own_shapes.values())
        node = self.rig.node("default", sizes.arena)
        engine.begin("own", socket=node.socket, shapes=shapes, chunks=sizes.own_chunks)
        told = engine.answer(min(self.rig.deadline.left(), 20.0))
        self.rig.report.note("copies in the engine's process with a node of default settings", told)
        if "error" in told:
            node = self.rig.node("trusting", sizes.arena, "trust_engines = true")
            told = engine.ask(self.rig.deadline, "own", socket=node.socket, shapes=shapes, chunks=sizes.own_chunks)
            self.rig.report.note("the same with trust_engines", told)
        self.rig.report.check("chunks come back right, for each size of pages", all(told["right"]), list(sizes.own_shapes))
        for kind in COPIES_BESIDE:
            self._beside(engine, kind)
        yardstick = engine.ask(self.rig.deadline, "yardstick", size=GIB)
        self.rig.report.note("PyTorch's copy of 1 GiB of pinned memory, GB/s", told_rates(yardstick))
        for number, name in enumerate(sizes.own_shapes):
            self._own_rates(engine, number, name, yardstick)
        for line in engine.ask(self.rig.deadline, "choices")["choices"]:
            self.rig.report.note("how copies are made", line)

    def _beside(self, engine: Engine, kind: str) -> None:
        """What copies take from a matrix product."""
        what = f"a matrix product beside {kind}: less than 3 % slower"
        try:
            told = engine.ask(self.rig.deadline, "beside", number=1, kind=kind, groups=self.sizes.groups)
        except EngineError as error:
            return self.rig.report.check(what, False, error)
        off = (told["together"] / (sum(told["alone"]) / 2) - 1) * 100
        text = f"{off:+.1f} % ({rates(told['alone'], 3)} ms alone, {told['together']:.3f} ms), "
        text += f"{rates(told['rates'])} GB/s beside it, {rates(told['rates alone'])} GB/s without it"
        self.rig.report.check(what, off < 3 or self.sizes.fake, text)

    def _own_rates(self, engine: Engine, number: int, name: str, yardstick: dict[str, Any]) -> None:
        """Rates of copies in the engine's process, and their share of PyTorch's."""
        try:
            told = engine.ask(self.rig.deadline, "rates", number=number, seconds=self.sizes.own_seconds)
        except EngineError as error:
            return self.rig.report.check(name, False, error)
        both = [own / of for own, of in zip(told["both"], yardstick["both"], strict=True)]
        self.rig.report.note(f"{name}, GB/s", told_rates(told))
        alone = [f"{way} {told[f'{way} without requests']:.1f}" for way in ("load", "save")]
        self.rig.report.note(f"{name}, without the requests around the copies, GB/s", ", ".join(alone))
        share = [f"{way} {told[way] / yardstick[way]:.2f}" for way in ("load", "save")]
        self.rig.report.note(f"{name}, share of PyTorch's rate", f"{', '.join(share)}, both at once {rates(both, 2)}")

    def _some(self, count: int) -> list[int]:
        """Random pages."""
        return self.random.sample(range(self.sizes.shape["pages"]), count)

    def _loads(self, engine: Engine, what: str, number: int, pages: list[int]) -> None:
        """Checks that an engine loads a prompt: right bytes, and no others written."""
        try:
            told = engine.ask(self.rig.deadline, "load", number=number, pages=pages)
            self.rig.report.check(what, told["right"] and told["untouched"], "" if all(told.values()) else told)
        except EngineError as error:
            self.rig.report.check(what, False, error)

    def _worker(self, first: int) -> tuple[Node, Engine]:
        """A node, and an engine that copies all the time."""
        node, worker = self.rig.node("node", self.sizes.arena), self.rig.engine("worker")
        worker.ask(self.rig.deadline, "allocate", shape=self.sizes.shape)
        worker.ask(self.rig.deadline, "connect", socket=node.socket)
        worker.ask(self.rig.deadline, "stream", chunks=self.sizes.stream_chunks, first=first)
        self.rig.deadline.until(lambda: self._rounds(worker) >= 3, 5.0)
        return node, worker

    def _rounds(self, worker: Engine) -> int:
        return int(worker.ask(self.rig.deadline, "streamed")["rounds"])

    def _worker_ends(self, worker: Engine, node: Node) -> None:
        rounds = self._rounds(worker)
        self.rig.deadline.until(lambda: self._rounds(worker) > rounds + 1, 3.0)
        told = worker.ask(self.rig.deadline, "streamed", stop=True)
        is_right = told["failed"] == 0 and told["rounds"] > rounds
        self.rig.report.check("no copy of the other engine failed or had a wrong byte", is_right, told)
        lives = self._lives(node, has_failed=told["failed"] > 0)
        self.rig.report.check("the node lives", lives, "" if lives else node.log_end())

    def _lives(self, node: Node, *, has_failed: bool) -> bool:
        """Whether a node lives; the end of a node that has failed takes a while."""
        return node.is_alive() and not (has_failed and self.rig.deadline.until(lambda: not node.is_alive(), 2.0))

    def _torment(self, engine: Engine, phase: str, socket: str, first: int) -> float:
        """Lets an engine begin a phase, and chooses the seconds until the kill."""
        engine.begin("torment", phase=phase, socket=socket, first=first, chunks=self.sizes.torment_chunks)
        engine.end(self.rig.deadline, 10.0)
        return self.random.uniform(0.0, 0.15)

    def _tier_loads(self, engine: Engine, what: str, numbers: list[int], times: int) -> dict[str, Any]:
        told = engine.ask(self.rig.deadline, "loads", numbers=numbers, chunks=self.sizes.tier_chunks, times=times)
        text = ", ".join(f"{' and '.join(tiers)}: {rate:.1f} GB/s" for tiers, rate in told["loads"])
        self.rig.report.check(f"{what}: right bytes", told["right"], text)
        return told

    def _tier_rates(self, loads: list[tuple[list[str], float]], chunks: int) -> None:
        best = {"host": 0.0, "device": 0.0}
        for tier in best:
            best[tier] = max((rate for tiers, rate in loads if tiers == [f"{chunks} {tier}"]), default=0.0)
        is_there = best["host"] > 0 and best["device"] > 0
        ratio = best["device"] / best["host"] if is_there else 0.0
        text = f"device {best['device']:.1f} GB/s, host {best['host']:.1f} GB/s, {ratio:.1f} times as fast"
        self.rig.report.check("loads come from the host, then from the device tier", is_there, text)


def rates(values: list[float], digits: int = 1) -> str:
    """Rates as text."""
    return " and ".join(f"{value:.{digits}f}" for value in values)


def told_rates(told: dict[str, Any]) -> str:
    """Rates of both directions, and of both at once, as text."""
    return f"load {told['load']:.1f}, save {told['save']:.1f}, both at once {rates(told['both'])}"


def main() -> int:
    """Runs the steps."""
    parser = options_of(__doc__, seconds=90.0, last_step=7)
    parser.add_argument("--fake", action="store_true", help="small, over the stand-in for CUDA's driver")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    options = parser.parse_args()
    only = {int(number) for number in options.only.split(",")}
    if not options.fake and (lacking := missing("torch", needs_gpu=True)):
        say(f"nothing to check here: {lacking}")
        return 0
    say(f"seed {options.seed}")
    rig = Rig(options.larder, options.fake, Report(options.json))
    end_after(options.seconds, rig.report, rig.close)
    faults = Faults(rig, Sizes(options.fake), options.seed)
    steps = [
        (1, "there and back", faults.there_and_back, 20, 2),
        (2, "engines are killed", faults.engine_killed, 25, 1 + KILLS * len(PHASES)),
        (3, "nodes are killed", faults.node_killed, 20, 1),
        (4, "false handles", faults.false_handles, 15, 2),
        (5, "memory freed under copies", faults.freed_under_copies, 15, 2),
        (6, "the device tier", faults.device_tier, 20, 1),
        (7, "copies beside a computation", faults.beside_computation, 25, 1),
    ]
    try:
        engines = sum(engines for number, *_, engines in steps if number in only)
        rig.report.note("the card's memory at the start", f"{rig.at_start / MIB:.0f} MiB used")
        rig.start_spares(engines, 2 if 1 in only and not options.fake else 0, options.seconds / 2)
        say("all engines have loaded PyTorch")
        for number, name, action, seconds, _ in steps:
            if number in only:
                left = options.seconds - (time.monotonic() - STARTED) - 10
                rig.report.step, rig.deadline = str(number), Deadline(max(min(seconds, left), 1.0))
                run_step(rig.report, name, action)
                rig.end_step()
    finally:
        rig.close()
    rig.report.table()
    return 1 if rig.report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
