#!/usr/bin/env python3
"""Checks the documentation in docs/book, and builds it if mdbook is installed.

    tests/book.py          every page is in SUMMARY.md and every link, anchor, picture and include is there;
                           the configuration reference is that of deploy/config, and the HTTP reference that of the code
    tests/book.py write    makes both references anew
"""

import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

sys.dont_write_bytecode = True

import http_reference
from parts import skip

ROOT = Path(__file__).resolve().parent.parent
BOOK = ROOT / "docs/book"
PAGES = BOOK / "src"
REFERENCE = PAGES / "configuration.md"
INCLUDE = re.compile(r"\{\{#include ([^}:]+)(?::([\w-]+))?\}\}")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
KEY = re.compile(r"(# )?([a-z_]+) = (.+)")
SECTION = re.compile(r"(# )?(\[\[?[a-z_]+\]\]?)")

INTRODUCTION = """\
# Configuration

This page lists every key of the two configuration files (`deploy/config`) with its default. `larder node --print-config` and
`larder coordinator --print-config` print the files. `larder config check FILE` shows the values of a file on a machine.

<!-- Made by tests/book.py from deploy/config: change those, then run `tests/book.py write`. -->
"""


def main():
    if sys.argv[1:] == ["write"]:
        REFERENCE.write_text(reference())
        http_reference.PAGE.write_text(http_reference.written(http_reference.PAGE.read_text()))
        return
    problems = pages_and_summary() + links() + reference_is_current() + pictures()
    problems += http_reference.problems(http_reference.PAGE.read_text())
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        sys.exit(1)
    print(f"{len(list(PAGES.glob('**/*.md')))} files of the book are whole; {build()}")


def pages_and_summary():
    """Checks that every page is in the summary once, and the summary names no other page."""
    named = [target for target in LINK.findall((PAGES / "SUMMARY.md").read_text())]
    there = [str(page.relative_to(PAGES)) for page in PAGES.glob("**/*.md") if page.name != "SUMMARY.md"]
    problems = [f"SUMMARY.md names {name}, which is not there" for name in named if name not in there]
    problems += [f"{name} is not in SUMMARY.md" for name in there if name not in named]
    return problems + [f"SUMMARY.md names {name} twice" for name in set(named) if named.count(name) > 1]


def expanded(page):
    """A page with its includes; raises ValueError for a missing include."""

    def included(match):
        path, anchor = (page.parent / match[1]).resolve(), match[2]
        if not path.exists():
            raise ValueError(f"{page.name} includes {match[1]}, which is not there")
        text = path.read_text()
        if not anchor:
            return text
        part = re.search(rf"ANCHOR: {anchor}\b[^\n]*\n(.*?)\n[^\n]*ANCHOR_END: {anchor}\b", text, re.S)
        if not part:
            raise ValueError(f"{page.name} includes {match[1]}:{anchor}, an anchor that is not there")
        return part[1]

    return INCLUDE.sub(included, page.read_text())


def without_code(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def anchors(text):
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", without_code(text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def links():
    """Checks that links within the book lead to pages, headings and pictures that are there, and that no link leads out of the
    book into the tree."""
    problems = []
    for page in sorted(PAGES.glob("**/*.md")):
        try:
            text = without_code(expanded(page))
        except ValueError as problem:
            problems.append(str(problem))
            continue
        for target in LINK.findall(text):
            if re.match(r"https?://", target):
                continue
            name, _, anchor = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            if not path.is_file() or not path.is_relative_to(PAGES):
                problems.append(f"{page.name} links to {target}, which is not in the book")
            elif anchor and anchor not in anchors(expanded(path)):
                problems.append(f"{page.name} links to {target}, but {path.name} has no such heading")
    return problems


def pictures():
    """Checks that pictures are well-formed, have descriptions, and that every picture is used."""
    text = "".join(page.read_text() for page in PAGES.glob("**/*.md"))
    problems = []
    for picture in sorted(PAGES.glob("pictures/*")):
        if picture.name not in text:
            problems.append(f"no page shows {picture.name}")
        if picture.suffix == ".svg":
            root = xml.etree.ElementTree.parse(picture).getroot()
            if root.find("{http://www.w3.org/2000/svg}title") is None:
                problems.append(f"{picture.name} has no title")
    return problems


def reference_is_current():
    if REFERENCE.exists() and REFERENCE.read_text() == reference():
        return []
    return ["configuration.md is not that of deploy/config: run `tests/book.py write`"]


def reference():
    parts = [INTRODUCTION]
    for name in ["node", "coordinator"]:
        parts.append(f"## {name}.toml\n\n" + file_reference((ROOT / f"deploy/config/{name}.toml").read_text()))
    return "\n".join(parts)


def file_reference(text):
    """A table for each section of a file; comments before a key or section are its explanation."""
    lines, comment, rows = [], [], []

    def end_table():
        if rows:
            lines.extend(["| key | default | |", "| --- | --- | --- |", *rows, ""])
            rows.clear()

    for line in text.splitlines():
        section, key = SECTION.fullmatch(line), KEY.fullmatch(line)
        if section:
            end_table()
            optional = " (not set by default)" if section[1] else ""
            lines.extend([f"### `{section[2]}`{optional}", ""])
            if comment:
                lines.extend([" ".join(comment), ""])
        elif key:
            default = absence(bool(key[1]), key[2], " ".join(comment), lines) + f"`{key[3]}`"
            rows.append(f"| `{key[2]}` | {default} | {' '.join(comment)} |")
        elif line.startswith("# "):
            comment.append(line[2:])
            continue
        elif comment:
            # A comment that belongs to no key describes the file.
            lines.extend([" ".join(comment), ""])
        comment = []
    end_table()
    return "\n".join(lines)


def absence(is_comment, name, comment, lines):
    """The text in place of a missing default. `lines` are the lines up to the section's own explanation."""
    start = max((i for i, line in enumerate(lines) if line.startswith("### ")), default=len(lines))
    section = " ".join(lines[start:])
    is_optional = "(not set by default)" in section
    names = re.findall(r"`(\w+)`", (re.search(r"[^.]*\bno default\b", section) or [""])[0])
    if is_comment and (not is_optional or "where it is not given" in comment or "Default:" in comment):
        return "not set; for example "
    return "none; for example " if name in names or (is_optional and "[[" in section) else ""


def build():
    """Builds the book, and returns where it is."""
    mdbook = shutil.which("mdbook")
    if not mdbook:
        skip("building the book", "mdbook is not here (cargo install mdbook)")
        return "it was not built"
    built = subprocess.run([mdbook, "build", BOOK], capture_output=True, text=True)
    if built.returncode or "ERROR" in built.stderr or "WARN" in built.stderr:
        sys.exit(built.stdout + built.stderr)
    return "built into target/book"


if __name__ == "__main__":
    main()
