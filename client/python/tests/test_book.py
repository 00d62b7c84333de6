"""The book's pages on engines say what the code does."""

from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from larder_kv import keyed
from larder_kv.router.__main__ import make_parser
from larder_kv.router.metrics import Metrics
from larder_kv.settings import NodeSettings, allowed
from larder_kv.vllm import counts
from larder_kv.vllm.settings import Settings, TierSettings

PAGES = Path(__file__).resolve().parents[3] / "docs/book/src"


def section(page: str, heading: str) -> str:
    return (PAGES / page).read_text().split(f"## {heading}\n")[1].split("\n## ")[0]


def rows(page: str, heading: str) -> dict[str, list[str]]:
    lines = [line for line in section(page, heading).splitlines() if "| `" in line]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {row[0].strip("|` "): row[1:] for row in cells}


@pytest.mark.parametrize(
    ("page", "heading", "settings"),
    [
        ("vllm.md", "Settings", Settings),
        ("vllm.md", "A tier below vLLM's own offloading", TierSettings),
        ("sglang.md", "Settings", NodeSettings),
        ("lmcache.md", "Settings", NodeSettings),
    ],
)
def test_the_settings_are_those_of_the_code(page, heading, settings):
    """If this fails, write the expected table."""
    written = [line for line in section(page, heading).splitlines() if line.startswith("|")]
    assert "\n".join(written) == table(settings)


def table(settings: type) -> str:
    lines = ["| key | default | allowed | meaning |", "| --- | --- | --- | --- |"]
    for one in fields(settings):
        cells = [f"`{one.name}`", shown(one.default), allowed(one), one.metadata["meaning"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


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


def test_the_routers_options_are_those_of_the_code():
    """If this fails, write the expected table."""
    written = [line for line in section("router.md", "Options").splitlines() if line.startswith("|")]
    lines = ["| option | default | meaning |", "| --- | --- | --- |"]
    for one in make_parser()._actions:
        if one.dest != "help":
            default = "not set" if one.default is False or one.default in (None, "", []) else f"`{one.default}`"
            meaning = (one.help or "").split(" (default")[0]
            lines.append(f"| `{one.option_strings[0]}` | {default} | {meaning} |")
    assert "\n".join(written) == "\n".join(lines)


def test_the_routers_metrics_are_those_of_the_code():
    written = {name: row[0].removesuffix(" |") for name, row in rows("router.md", "What it counts").items()}
    kept = Metrics()._registry.collect()
    assert written == {one.name + ("_total" if one.type == "counter" else ""): one.documentation for one in kept}
