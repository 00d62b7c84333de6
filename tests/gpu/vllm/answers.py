"""What engines answer, and how answers compare."""

import statistics
from dataclasses import dataclass
from typing import Any, NamedTuple

from prompts import LENGTHS


@dataclass
class Answers:
    """The answers to prompts: the tokens, their log-probabilities, and what the engine counted meanwhile."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    counts: dict[str, float]

    def part(self, first: int, last: int, tokens: int | None = None) -> "Answers":
        """The answers to some of the prompts, or only their first tokens."""
        cut = slice(first, last)
        return Answers([one[:tokens] for one in self.tokens[cut]], [one[:tokens] for one in self.logprobs[cut]], {})

    @property
    def loaded(self) -> int:
        """Tokens of the prompts that a connector has loaded."""
        return loaded(self.counts)

    @property
    def preemptions(self) -> int:
        """How often a request gave its blocks back."""
        return int(self.counts.get("num_preemptions", 0))

    @property
    def larder(self) -> str:
        """What Larder's connector has counted."""
        counted = {name.removeprefix("larder_"): value for name, value in self.counts.items() if name.startswith("larder_")}
        return ", ".join(f"{name} {value:.0f}" for name, value in sorted(counted.items())) or "nothing"


@dataclass
class FirstTokens:
    """The seconds to the first tokens of prompts, and what the engine counted meanwhile."""

    seconds: list[float]
    counts: dict[str, float]

    @property
    def loaded(self) -> int:
        """Tokens of the prompts that a connector has loaded."""
        return loaded(self.counts)

    def __str__(self) -> str:
        times = sorted(1_000 * one for one in self.seconds)
        return f"median {statistics.median(times):.1f} ms ({times[0]:.1f} to {times[-1]:.1f}, {len(times)} asked)"


class Comparison(NamedTuple):
    """Whether the tokens are identical, and words about them and the log-probabilities."""

    identical: bool
    text: str


def loaded(counts: dict[str, Any]) -> int:
    """Tokens that a connector has loaded."""
    return int(counts.get("prompt_tokens_by_source.external_kv_transfer", 0))


def compare(got: Answers, expected: Answers) -> Comparison:
    """Compares answers. Log-probabilities are compared up to the first token that differs."""
    places, apart = [], 0.0
    for number, (one, other) in enumerate(zip(got.tokens, expected.tokens, strict=True)):
        pairs = enumerate(zip(one, other, strict=True))
        same = next((place for place, (token, wanted) in pairs if token != wanted), len(other))
        if same < len(other):
            places.append(f"answer {number} from token {same}")
        both = list(zip(got.logprobs[number], expected.logprobs[number], strict=True))
        apart = max([apart, *(abs(value - wanted) for value, wanted in both[: same + 1])])
    tokens = "tokens identical" if not places else f"tokens DIFFER ({', '.join(places[:4])}; of {len(got.tokens)} answers)"
    bits = "bitwise equal" if got.logprobs == expected.logprobs else f"at most {apart:.2e} apart"
    return Comparison(not places, f"{tokens}, log-probabilities {bits}")


def by_length(seconds: list[float]) -> str:
    """The median for each length of prompt, in milliseconds."""
    found: dict[int, list[float]] = {}
    for number, one in enumerate(seconds):
        found.setdefault(LENGTHS[number % len(LENGTHS)], []).append(1_000 * one)
    return "  ".join(f"{length}: {statistics.median(times):7.1f}" for length, times in found.items())
