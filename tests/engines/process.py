"""Processes of engines that are controlled by lines of JSON."""

import json
import subprocess
import threading
from pathlib import Path


PATIENCE_SECONDS = 300.0


class Process:
    """A process that answers each line of JSON with one line."""

    def __init__(self, scratch: Path, name: str, command: list, environment: dict[str, str]):
        self.name = name
        self.log = scratch / f"{name}.log"
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(self.log, "w"),
            env=environment,
            text=True,
        )

    def __enter__(self):
        try:
            self.answer()
        except BaseException:
            self.process.kill()
            raise
        return self

    def __exit__(self, *error):
        self.process.stdin.close()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def send(self, asked: dict) -> dict:
        """Asks, and waits for the answer."""
        self.write(asked)
        return self.answer()

    def write(self, asked: dict) -> None:
        """Asks, without waiting for the answer."""
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict:
        """The next answer."""
        limit = threading.Timer(PATIENCE_SECONDS, self.process.kill)
        limit.start()
        line = self.process.stdout.readline()
        limit.cancel()
        if not line:
            tail = "".join(self.log.read_text().splitlines(keepends=True)[-30:])
            raise RuntimeError(f"{self.name} has died:\n{tail}")
        return json.loads(line)
