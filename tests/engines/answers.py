"""Prompts for engines, and helpers that read answers."""


def prompt(seed: int, tokens: int = 200) -> list[int]:
    """Tokens that no other seed has in its first block."""
    return [seed % 1_000 + 3] + [(i * i * 7 + i * (13 + seed)) % 1_000 + 3 for i in range(1, tokens)]


def same(answer: dict, expected: dict) -> None:
    assert answer["finish"] == expected["finish"], f"{answer['finish']} is not {expected['finish']}"
    assert answer["tokens"] == expected["tokens"], "other tokens than without Larder"
    assert answer["logprobs"] == expected["logprobs"], "other log-probabilities than without Larder"


def hit_of(engine, tokens: list[int], expected: dict) -> dict | None:
    """The answer to a prompt of 200 tokens whose chunks are all loaded; None if they are not."""
    answer = engine.ask(tokens, forget=True)
    same(answer, expected)
    return answer if loaded(answer) == 192 else None


def loaded(answer: dict) -> int:
    return int(answer["counts"].get("prompt_tokens_by_source.external_kv_transfer", 0))


def computed(answer: dict) -> int:
    return int(answer["counts"].get("prompt_tokens_by_source.local_compute", 0))


def counted(answer: dict, name: str) -> int:
    return int(answer["counts"].get(f"larder_{name}", 0))
