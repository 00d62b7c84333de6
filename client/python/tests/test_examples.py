"""The examples do what they say."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_the_examples_run(cluster):
    said = {name: run(EXAMPLES / name, cluster.sockets[0]) for name in ("put_and_get.py", "prefetch.py")}
    assert "768 of 1000 tokens are in the cache of node-0" in said["put_and_get.py"]
    assert "begins with 3" in said["put_and_get.py"]
    assert "tokens in place: 768 0 0 0 0 0 0 0" in said["prefetch.py"]


def run(path: Path, argument: str) -> str:
    done = subprocess.run([sys.executable, path, argument], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout
