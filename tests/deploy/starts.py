"""Starts a node whose memory comes slowly: a debugger stops the thread that takes it from the system."""

import json
import re
import subprocess
import time
import urllib.error
import urllib.request

from debugger import StoppedThread
from live import free_ports, larder
from tools import ROOT, Missing, found

# Extents of 2 MiB: this many come in a moment, and the chunks that the engine saves fit in the first ones.
CONFIG = """
name = "a"
[http]
listen = "{http}"
[host]
arena_bytes = "1GiB"
extent_bytes = "2MiB"
[[tenants]]
name = "default"
socket = "{socket}"
"""
ENOUGH_MIB = 16
FAULTS = re.compile(r"larder-fault")


def serves_while_memory_comes(folder):
    """An engine saves and reads chunks as soon as the first extents are there; readyz says how much memory is there. Returns a
    summary."""
    engine = ROOT / "target/debug/test-engine"
    if not engine.exists():
        raise Missing("the tests' engine is not built: cargo build --workspace --bins")
    port, *_ = free_ports()
    socket, http = folder / "node.sock", f"127.0.0.1:{port}"
    (folder / "node.toml").write_text(CONFIG.format(http=http, socket=socket))
    # One CPU, so that only one thread takes the memory.
    command = [found("taskset"), "--cpu-list", "0", larder(), "node", "--config", folder / "node.toml"]
    with (folder / "log").open("w") as log:
        node = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        before = wait(lambda: said(http), lambda text: mebibytes(text) >= ENOUGH_MIB)
        thread = StoppedThread(node.pid, FAULTS)
        before = said(http)
        assert mebibytes(before) < 1024 and "sessions are accepted already" in before, before
        run_engine(engine, socket, "put")
        run_engine(engine, socket, "get")
        status = json.loads(said(http, "/status"))
        (actor,) = status["actors"]
        assert not status["ready"] and status["hardware"] is None and actor["chunks"] == 8 * 128, status
        assert said(http) == before, "memory came though its thread stands still"
        thread.go_on()
        wait(lambda: said(http), lambda text: text == "ok\n")
        assert json.loads(node.stdout.readline())["ready"]
        status = json.loads(said(http, "/status"))
        (actor,) = status["actors"]
        assert status["ready"] and actor["quarantined_bytes"] == 0 and actor["chunks"] == 8 * 128, status
        run_engine(engine, socket, "get")
        tenths = (folder / "log").read_text().count("memory comes")
        assert tenths == 10, f"{tenths} lines of the log say how far it is"
        node.terminate()
        assert node.wait(timeout=30) == 0
    finally:
        node.kill()
        node.wait()
    return f"1,024 chunks are saved and read when {before.partition(' of memory')[0]} are there"


def mebibytes(text):
    found = re.match(r"([\d.]+) MiB of 1.0 GiB", text)
    return float(found[1]) if found else 0


def said(http, path="/readyz"):
    try:
        with urllib.request.urlopen(f"http://{http}{path}", timeout=10) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.read().decode()
    except OSError:
        return ""


def run_engine(engine, socket, deed):
    process = subprocess.Popen([engine, socket, deed], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "done\n", f"the engine could not {deed}"
    finally:
        process.kill()
        process.wait()


def wait(ask, is_so, seconds=60):
    deadline = time.monotonic() + seconds
    while not is_so(answer := ask()):
        assert time.monotonic() < deadline, answer
        time.sleep(0.002)
    return answer
