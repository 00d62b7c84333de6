"""The book's page on vLLM says what the code does."""

from dataclasses import MISSING, fields
from pathlib import Path

from larder_kv.vllm.counts import COUNTERS
from larder_kv.vllm.settings import Settings

PAGE = (Path(__file__).resolve().parents[3] / "docs/book/src/vllm.md").read_text()


def rows(heading: str) -> dict[str, list[str]]:
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines() if "| `" in line]
    return {row[0].strip("|` "): row[1:] for row in cells}


def test_the_settings_are_those_of_the_code():
    written = {name: row[0] for name, row in rows("Settings").items()}
    expected = {field.name: shown(field.default) for field in fields(Settings)}
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


def test_the_counters_are_those_of_the_code():
    written = {name: row[0].removesuffix(" |") for name, row in rows("What it counts").items()}
    assert written == {f"vllm:larder_{name}_total": meaning for name, meaning in COUNTERS.items()}
