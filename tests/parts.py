"""Runs the parts of a test run one after the other, and prints a table of their results.

A part is one command or more; it fails with its first command that fails. Tests that cannot run on this machine are skipped, with
their reason, and never count as passed:

- A test or a step appends a line `NAME<tab>REASON` to the file that the environment's LARDER_SKIPS names.
- A command that can do nothing of its part does so too, and ends with the status 77.
- pytest has its own skips; they come with its JUnit file.

A test that fails and passes when it is tried again is named in the table: it does not fail the run, but it is a fault.

If no terminal shows the run, the last lines of each failed part follow the table: a reader who keeps only the end of the output
learns the reason.
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
# The last lines of a failed part.
LAST_LINES = 30
# How long output is read after a command has ended.
READ_ON_SECONDS = 5


def skip(name, reason):
    """Says that a test or a step cannot run here."""
    print(f"skipped  {name}: {reason}", flush=True)
    if path := os.environ.get("LARDER_SKIPS"):
        with open(path, "a") as file:
            file.write(f"{name}\t{' '.join(str(reason).split())}\n")


def features():
    """The features with which all programs that tests start are built. Without protoc there are no elections through etcd, and
    their tests say so."""
    etcd = ",larder-tests/etcd" if shutil.which("protoc") else ""
    return ["--features", f"larder-tests/kubernetes,larder-tests/tokenizers{etcd}"]


@dataclass
class Part:
    """The result of a part."""

    name: str
    result: str
    seconds: float = 0.0
    # The counts, if the part's tests are known.
    tests_passed: int | None = None
    tests_failed: int = 0
    # Names and reasons of the skipped tests.
    skips: list = field(default_factory=list)
    # Names of tests that failed at first, and passed when they were tried again.
    flaky: list = field(default_factory=list)
    # The last lines of output, if no terminal shows it.
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
        """Names of the skipped tests, whatever the reason."""
        return {name for name, _ in self.skips}


class Run:
    """The parts so far. Leaving the block prints the table, whatever happened in it."""

    def __init__(self, folder, budget_minutes):
        self.folder = Path(folder)
        self.budget_minutes = budget_minutes
        self.parts = []
        self.began = time.monotonic()

    def __enter__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        # If the run is ended from outside, the table shows how far it was.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
        return self

    def __exit__(self, kind, *_):
        print("\n== results\n" + self.table() + self.failures(), flush=True)
        if kind is None:
            sys.exit(self.status())

    def seconds(self):
        return time.monotonic() - self.began

    def part(self, name, *commands, junit=None, **environment):
        """Runs the commands of a part, each a list of words, until one fails. `junit` is the file with their results."""
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
        """Notes a part that cannot run here."""
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
    """The status of a command; a missing command has the status of a shell. If no terminal shows its output, the last lines are
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
        # Processes that the command has left running may keep the pipe open.
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
    """Adds the counts of a JUnit file."""
    cases = list(ElementTree.parse(junit).getroot().iter("testcase"))
    for case in cases:
        if (skipped := case.find("skipped")) is not None:
            part.skips.append((case.get("name"), skipped.get("message", "")))
    part.flaky = [case.get("name") for case in cases if case.find("flakyFailure") is not None]
    part.tests_failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    part.tests_passed = len(cases) - part.tests_failed - len(part.skipped())


def minutes(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
