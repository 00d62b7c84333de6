"""Runs the parts of a test run one after the other, and prints a table of what came of each.

A part is one command or more; it fails with the first that does. What cannot run on this machine is skipped, with its reason, and
never counts as passed:

- A test or a step appends a line `NAME<tab>REASON` to the file that the environment's LARDER_SKIPS names.
- A command that could do nothing of its part does so too, and ends with the status 77.
- pytest has its own skips; they come with its JUnit file.

A test that fails and passes when it is tried again is named in the table: it does not fail the run, and is a fault all the same.

Where no terminal shows the run, the table is followed by the last lines of each part that failed: who keeps only the end of what
was printed learns why.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

NOTHING_DONE = 77
# Of a part that failed.
LAST_LINES = 30
# After a command has ended.
READ_ON_SECONDS = 5


def skip(name, reason):
    """Says that a test or a step cannot run here."""
    print(f"skipped  {name}: {reason}", flush=True)
    if path := os.environ.get("LARDER_SKIPS"):
        with open(path, "a") as file:
            file.write(f"{name}\t{' '.join(str(reason).split())}\n")


def features():
    """With which everything is built that tests start. Without protoc there are no elections through etcd, and their tests say so."""
    etcd = ",larder-tests/etcd" if shutil.which("protoc") else ""
    return ["--features", f"larder-tests/kubernetes,larder-tests/tokenizers{etcd}"]


@dataclass
class Part:
    """What came of a part."""

    name: str
    result: str
    seconds: float = 0.0
    # Of a part of which that is known.
    tests_passed: int | None = None
    tests_failed: int = 0
    # Names and reasons of what was skipped in it.
    skips: list = field(default_factory=list)
    # Names of tests that failed at first, and passed when they were tried again.
    flaky: list = field(default_factory=list)
    # What it printed last, where no terminal shows it.
    last_lines: deque = field(default_factory=lambda: deque(maxlen=LAST_LINES))

    def detail(self):
        counts = []
        if self.tests_passed is not None:
            flaky = f" ({len(self.flaky):,} at the second try)" if self.flaky else ""
            counts.append(f"{self.tests_passed:,} tests passed{flaky}")
        if self.tests_failed:
            counts.append(f"{self.tests_failed:,} failed")
        if self.skips and self.result != "skipped":
            counts.append(f"{len(self.skipped()):,} skipped")
        return ", ".join(counts)

    def skipped(self):
        """Names of what was skipped, for whatever reasons."""
        return {name for name, _ in self.skips}


class Run:
    """The parts so far. Leaving it prints the table, whatever happened within."""

    def __init__(self, folder, budget_minutes):
        self.folder = Path(folder)
        self.budget_minutes = budget_minutes
        self.parts = []
        self.began = time.monotonic()

    def __enter__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        # Who ends the run wants to know how far it was.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
        return self

    def __exit__(self, kind, *_):
        print("\n== results\n" + self.table() + self.failures(), flush=True)
        if kind is None:
            sys.exit(self.status())

    def seconds(self):
        return time.monotonic() - self.began

    def part(self, name, *commands, junit=None, **environment):
        """Runs the commands of a part, each a list of words, until one fails. `junit` is the file that they leave."""
        print(f"\n== {name}", flush=True)
        skips = self.folder / "skips"
        skips.write_text("")
        if junit:
            Path(junit).unlink(missing_ok=True)
        began = time.monotonic()
        part = Part(name, "interrupted")
        self.parts.append(part)
        environment = os.environ | {"LARDER_SKIPS": str(skips.absolute())} | environment
        try:
            statuses = [0]
            for command in commands:
                if statuses[-1] in (0, NOTHING_DONE):
                    statuses.append(started(command, environment, part.last_lines))
            part.result = result(statuses[1:])
        finally:
            part.seconds = time.monotonic() - began
            lines = dict.fromkeys(skips.read_text().splitlines())
            part.skips = [tuple(line.split("\t", 1)) for line in lines]
            if junit and Path(junit).exists():
                count(part, junit)

    def skip(self, name, reason):
        """A part that cannot run here."""
        print(f"\n== {name}\nskipped: {reason}", flush=True)
        self.parts.append(Part(name, "skipped", skips=[(name, reason)]))

    def failures(self):
        """The last lines of the parts that failed."""
        failed = [part for part in self.parts if part.result == "FAILED" and part.last_lines]
        return "".join(f"\n\n== the end of: {part.name}\n{''.join(part.last_lines).rstrip()}" for part in failed)

    def status(self):
        return 0 if all(part.result in ("passed", "skipped") for part in self.parts) else 1

    def table(self):
        width = max((len(part.name) for part in self.parts), default=0)
        lines = []
        for part in self.parts:
            line = f"{part.name:<{width}}  {part.result:<7}  {minutes(part.seconds):>6}  {part.detail()}"
            lines.append(line.rstrip())
            lines += [f"{'':<{width}}  - {name}: FLAKY, look into it" for name in part.flaky]
            for name, reason in part.skips:
                lines.append(f"{'':<{width}}  - {reason}" if name == part.name else f"{'':<{width}}  - {name}: {reason}")
        results = [part.result for part in self.parts]
        passed, skipped = results.count("passed"), results.count("skipped")
        steps = sum(len(part.skipped()) for part in self.parts if part.result != "skipped")
        lines.append(
            f"{passed} parts passed, {skipped} skipped, {len(results) - passed - skipped} failed; "
            f"{steps} tests and steps skipped in others; {minutes(self.seconds())} of {self.budget_minutes}:00 minutes"
        )
        return "\n".join(lines)


def started(command, environment, last_lines):
    """The status of a command; one that is not there has that of a shell. Where no terminal shows what it prints, its last lines are
    kept."""
    words = [str(word) for word in command]
    try:
        if sys.stdout.isatty():
            return subprocess.run(words, env=environment, check=False).returncode
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        process = subprocess.Popen(words, env=environment, **pipe)
        reader = threading.Thread(target=show, args=(process.stdout, last_lines), daemon=True)
        reader.start()
        status = process.wait()
        # What the command has left running may keep its end of the pipe.
        reader.join(READ_ON_SECONDS)
        return status
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127


def show(lines, last_lines):
    for line in lines:
        print(line, end="", flush=True)
        last_lines.append(line)


def result(statuses):
    if any(status not in (0, NOTHING_DONE) for status in statuses):
        return "FAILED"
    return "skipped" if statuses and all(status == NOTHING_DONE for status in statuses) else "passed"


def count(part, junit):
    """Adds what a JUnit file says."""
    cases = list(ElementTree.parse(junit).getroot().iter("testcase"))
    for case in cases:
        if (skipped := case.find("skipped")) is not None:
            part.skips.append((case.get("name"), skipped.get("message", "")))
    part.flaky = [case.get("name") for case in cases if case.find("flakyFailure") is not None]
    part.tests_failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    part.tests_passed = len(cases) - part.tests_failed - len(part.skipped())


def minutes(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
