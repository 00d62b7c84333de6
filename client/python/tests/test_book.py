"""The book's pages on engines say what the code does."""

from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from larder_kv import keyed
from larder_kv.settings import NodeSettings
from larder_kv.vllm import counts
from larder_kv.vllm.settings import Settings

PAGES = Path(__file__).resolve().parents[3] / "docs/book/src"


def rows(page: str, heading: str) -> dict[str, list[str]]:
    section = (PAGES / page).read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines() if "| `" in line]
    return {row[0].strip("|` "): row[1:] for row in cells}


@pytest.mark.parametrize(
    ("page", "settings"), [("vllm.md", Settings), ("sglang.md", NodeSettings), ("lmcache.md", NodeSettings)]
)
def test_the_settings_are_those_of_the_code(page, settings):
    written = {name: row[0] for name, row in rows(page, "Settings").items()}
    expected = {field.name: shown(field.default) for field in fields(settings)}
    assert written == expected


def shown(default: object) -> str:
    match default:
        case None:
            return "not set"
        case "":
            return "empty"
        case bool():
            return f"`{str(default).lower()}`"
    return "required" if default is MISSING else f"`{default}`"


@pytest.mark.parametrize(
    ("page", "prefix", "counters"),
    [
        ("vllm.md", "vllm:larder", counts.COUNTERS),
        ("sglang.md", "sglang:larder", keyed.COUNTERS),
        ("lmcache.md", "lmcache:larder", keyed.COUNTERS),
    ],
)
def test_the_counters_are_those_of_the_code(page, prefix, counters):
    written = {name: row[0].removesuffix(" |") for name, row in rows(page, "What it counts").items()}
    assert written == {f"{prefix}_{name}_total": meaning for name, meaning in counters.items()}
