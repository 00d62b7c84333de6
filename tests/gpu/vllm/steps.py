"""The steps: what engines answer with Larder, beside what vLLM answers alone."""

import time

from answers import Answers, FirstTokens, compare
from configurations import BLOCK
from prompts import CHUNK, CHUNKS, CROWD, CROWD_TOKENS, HIT, LATER, LENGTHS, PROMPTS, TIMED, WARM, whole_chunks
from rig import Engine, Rig

SAVE_SECONDS = 10.0
"""Saves end in the background."""


class Steps:
    """The steps. Each public method is one."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self._computed = Answers([], [], {})
        self._own_hit = Answers([], [], {})
        self._kind: list[object] = []

    def alone(self) -> None:
        """vLLM alone: computed tokens, those of its own hit, and their times."""
        engine = self._engine("alone")
        self._kind = kind_of(engine)
        self.rig.report.note("vLLM", ", ".join(f"{name} {fact}" for name, fact in engine.facts.items()))
        self._computed = engine.ask(PROMPTS, forget=True)
        self._own_hit = engine.ask(PROMPTS)
        self.rig.report.note("vLLM alone, its own hit against computed", compare(self._own_hit, self._computed).text)
        self._identical("vLLM alone, computed twice", engine.ask(PROMPTS, forget=True), self._computed)
        self._times("computed", engine.first_tokens(TIMED, forget=True, rounds=2))
        hits = [engine.first_tokens([one, one]).seconds[1] for one in TIMED]
        self._times("vLLM's own hit", FirstTokens(hits, {}))

    def saves(self) -> None:
        """An engine with Larder's connector computes the same as vLLM alone, and saves all chunks."""
        engine = self._engine("saver")
        before = self.rig.chunks()
        got = engine.ask(PROMPTS, forget=True)
        self._identical("Larder saves, against computed", got, self._computed)
        self.rig.report.check("nothing is loaded", got.loaded == 0, got.larder)
        self._saved("chunks of the prompts", before, CHUNKS)
        self._times("a miss that Larder saves", engine.first_tokens(TIMED, forget=True))
        self._saved("chunks of the prompts and of the timed ones", before, 2 * CHUNKS)

    def loads(self) -> None:
        """A new engine loads what the first one has saved."""
        engine = self._engine("loader")
        got = engine.ask(PROMPTS, forget=True)
        self._all_loaded("Larder, in a new engine", got.loaded)
        self._identical("Larder loads, against vLLM's own hit", got, self._own_hit)
        self.rig.report.note("Larder loads, against computed", compare(got, self._computed).text)
        self.rig.report.note("Larder counts", got.larder)
        self._times("Larder's hit", engine.first_tokens(TIMED, forget=True, rounds=3), rounds=3)

    def preemption(self) -> None:
        """Requests at once in an engine that has no room for them: it takes blocks away while they are saved or loaded. In
        float32, requests that are computed together give the same tokens as requests that are computed alone."""
        alone = self.rig.engine("exact")
        alone.ask(CROWD[:1], max_tokens=4)
        expected = alone.ask(CROWD, max_tokens=CROWD_TOKENS, at_once=True, forget=True)
        self.rig.report.check("float32, vLLM alone has room", expected.preemptions == 0, f"{expected.preemptions} preemptions")
        few = alone.ask(CROWD[:4], max_tokens=CROWD_TOKENS, forget=True)
        self._identical("float32, vLLM alone, one after the other against at once", few, expected.part(0, 4))
        engine = self.rig.engine("tiny")
        before, half, preemptions = self.rig.chunks(), len(CROWD) // 2, 0
        for number, (first, last) in enumerate([(0, half), (half, 2 * half), (0, 2 * half), (0, 2 * half)]):
            got = engine.ask(CROWD[first:last], max_tokens=CROWD_TOKENS, at_once=True, forget=True)
            what = f"float32, round {number + 1}: {last - first} requests at once in {engine.facts['blocks']} blocks"
            more = f"; {got.preemptions} preemptions, {got.loaded} tokens loaded, {got.larder}"
            self._identical(what, got, expected.part(first, last), more)
            preemptions += got.preemptions
            time.sleep(0.3)
        self.rig.report.check("float32: requests were preempted", preemptions > 0, f"{preemptions} times")
        self._saved("chunks of the requests", before, whole_chunks(CROWD))
        got = engine.ask(CROWD, max_tokens=16, forget=True)
        self._identical("float32, one after the other, loaded, against computed", got, expected.part(0, len(CROWD), 16))
        self._all_loaded("float32, one after the other", got.loaded, CHUNK * whole_chunks(CROWD))

    def offloading(self) -> None:
        """vLLM's own offloading to the CPU, without Larder, for comparison."""
        engine = self._engine("offloader")
        self.rig.report.note("vLLM's CPU offloading, against computed", compare(engine.ask(PROMPTS, forget=True), self._computed).text)
        engine.first_tokens(TIMED, forget=True)
        engine.ask(WARM[:1], max_tokens=3)
        got = engine.ask(PROMPTS, forget=True)
        text = f"{compare(got, self._own_hit).text}; {got.loaded} of {HIT} tokens loaded"
        self.rig.report.note("vLLM's CPU offloading, its hit against vLLM's own hit", text)
        self._times("vLLM's CPU offloading, its hit", engine.first_tokens(TIMED, forget=True, rounds=3), rounds=3)

    def tier(self) -> None:
        """A new engine loads through `LarderTier` what another one has stored through it."""
        engine, before = self._engine("tier-saver"), self.rig.chunks()
        self._identical("LarderTier stores, against computed", engine.ask(PROMPTS, forget=True), self._computed)
        engine.first_tokens(TIMED, forget=True)
        blocks = before + 2 * sum(length // BLOCK for length in LENGTHS)

        def stored() -> bool:
            # vLLM's offloading goes on only while its engine steps.
            engine.ask(WARM[2:], max_tokens=2)
            return self.rig.chunks() >= blocks

        self.rig.report.check("blocks in the node", self.rig.until(stored), f"{self.rig.chunks() - before} of {blocks - before}")
        engine = self._engine("tier-loader")
        got = engine.ask(PROMPTS, forget=True)
        self._all_loaded("LarderTier, in a new engine", got.loaded)
        self._identical("LarderTier loads, against vLLM's own hit", got, self._own_hit)
        self.rig.report.note("LarderTier loads, against computed", compare(got, self._computed).text)
        self._times("LarderTier's hit", engine.first_tokens(TIMED, forget=True), rounds=1)
        self._times("LarderTier's engine again, from vLLM's memory", engine.first_tokens(TIMED, forget=True, rounds=2))

    def sync(self) -> None:
        """Loads with `load: "sync"`, layer by layer in the forward pass, with vLLM's model runner of version 1. If this runner's
        KV differs from the other's, the engine finds only what it has saved itself, and its own hit is the reference."""
        engine, before = self._engine("sync"), self.rig.chunks()
        got = engine.ask(PROMPTS, forget=True)
        if kind_of(engine) == self._kind:
            self._all_loaded("load: sync, in a new engine", got.loaded)
            self._identical("load: sync, against vLLM's own hit", got, self._own_hit)
        else:
            text = f"{got.loaded} of {HIT} tokens loaded; {compare(got, self._own_hit).text}"
            self.rig.report.note("load: sync, with another runner, against the other runner's own hit", text)
        engine.ask(LATER, forget=True)
        own_hit = engine.ask(LATER)
        self._saved("chunks of the later prompts", before, (HIT - got.loaded) // CHUNK + CHUNKS)
        got = engine.ask(LATER, forget=True)
        self._all_loaded("load: sync, in the engine that saved", got.loaded)
        self._identical("load: sync, against the engine's own hit", got, own_hit)
        self._times("Larder's hit, load: sync", engine.first_tokens(LATER, forget=True, rounds=3), rounds=3)

    def _engine(self, name: str) -> Engine:
        """An engine that has compiled its kernels for the shapes of the steps, and has loaded if it can."""
        engine = self.rig.engine(name)
        for _ in range(2):
            engine.ask(WARM, max_tokens=3)
        if name != "alone":
            time.sleep(0.4)
            engine.ask(WARM, max_tokens=3, forget=True)
        return engine

    def _identical(self, what: str, got: Answers, expected: Answers, more: str = "") -> None:
        """Checks that the tokens are identical."""
        result = compare(got, expected)
        self.rig.report.check(what, result.identical, result.text + more)

    def _all_loaded(self, what: str, loaded: int, of: int = HIT) -> None:
        """Checks that no chunk was missing."""
        self.rig.report.check(f"{what}: all is loaded", loaded == of, f"{loaded} of {of} tokens")

    def _saved(self, what: str, before: int, wanted: int) -> None:
        """Checks that the node has these chunks, which come in the background."""
        is_there = self.rig.until(lambda: self.rig.chunks() >= before + wanted, SAVE_SECONDS)
        self.rig.report.check(f"{what} in the node", is_there, f"{self.rig.chunks() - before} of {wanted}")

    def _times(self, name: str, got: FirstTokens, rounds: int = 0) -> None:
        """Notes times to first tokens; with `rounds`, of how many tokens were loaded in each."""
        self.rig.report.more["first_token_seconds"][name] = got.seconds
        more = f"; {got.loaded // rounds} of {HIT} tokens loaded" if rounds else ""
        self.rig.report.note(f"first token, {name}", f"{got}{more}")


def kind_of(engine: Engine) -> list[object]:
    """What two engines share that compute the same bits, and find each other's chunks."""
    return [engine.facts[name] for name in ("runner", "attention", "layout")]
