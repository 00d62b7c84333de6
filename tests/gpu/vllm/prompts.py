"""The prompts that engines are asked."""

import random

CHUNK = 256
"""Tokens of a chunk."""


def prompt(seed: int, tokens: int) -> list[int]:
    """Random tokens that every model here has."""
    source = random.Random(seed)
    return [source.randrange(3, 1_000) for _ in range(tokens)]


LENGTHS = (2_057, 3_081, 4_105, 4_105, 5_129, 6_153)
"""Each ends nine tokens after a chunk. So vLLM's own hit and Larder's end at the same token, and the same shapes are computed."""
PROMPTS = [prompt(100 + number, length) for number, length in enumerate(LENGTHS)]
TIMED = [prompt(200 + number, length) for number, length in enumerate(LENGTHS)]
LATER = [prompt(400 + number, length) for number, length in enumerate(LENGTHS)]
WARM = [prompt(900 + number, length) for number, length in enumerate((6_153, 4_105, 2_057))]
CROWD = [prompt(300 + number, CHUNK * (2 + number % 3) + 9) for number in range(24)]
"""Requests that are asked at once of an engine that has no room for them."""
CROWD_TOKENS = 96
"""Tokens of each answer to the crowd."""


def whole_chunks(prompts: list[list[int]]) -> int:
    """The whole chunks of prompts."""
    return sum(len(one) // CHUNK for one in prompts)


CHUNKS = whole_chunks(PROMPTS)
HIT = CHUNK * CHUNKS
"""Tokens that are loaded if all of `PROMPTS`, `TIMED` or `LATER` hit."""
