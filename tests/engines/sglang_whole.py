"""Scenario: whole SGLang engines of two ranks, including the model, on two nodes."""

import json
import os
import subprocess
import sys
from pathlib import Path

from driver import HERE, Cluster
from process import Process
from scenarios import row, until
from sglang_driver import PAGE, storage_config

PAGES, RANKS = 12, 2


class Server(Process):
    """A whole engine in processes of its own."""

    def __init__(self, scratch: Path, name: str, socket: str):
        options = {
            "model_path": str(scratch / "model"),
            "page_size": PAGE,
            "tp_size": RANKS,
            "enable_hierarchical_cache": True,
            "hicache_io_backend": "direct",
            "hicache_mem_layout": "page_first_direct",
            "hicache_write_policy": "write_through",
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config": json.dumps(storage_config(socket)),
            "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_ratio": 2.0,
        }
        processors = sorted(os.sched_getaffinity(0))
        binding = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(processors[rank % len(processors)]) for rank in range(RANKS))}
        command = [sys.executable, HERE / "sglang_server.py", json.dumps(options)]
        super().__init__(scratch, name, command, os.environ | binding)


def whole_engines(scratch: Path) -> None:
    """An engine loads a prompt's prefix that another engine computed, and its output is the same; an altered prefix is computed.
    SGLang's own ranks agree on what both of them found."""
    subprocess.run([sys.executable, HERE / "model.py", scratch / "model"], check=True)
    cluster = Cluster(scratch / "whole", 2)
    first, altered = ([seed] + [(i * i * 7 + i * 13) % 1_000 + 3 for i in range(1, 200)] for seed in (3, 4))
    # Both are started before the test waits for either.
    computing, loading = (Server(scratch, f"whole-{node}", cluster.sockets[node]) for node in (0, 1))
    with computing, loading:
        computed = computing.send({"tokens": first})
        until_announced(cluster, RANKS * PAGES)
        loaded = loading.send({"tokens": first})
        assert loaded["cached"].get("storage") == PAGES * PAGE, f"{loaded}"
        assert not any(computed["cached"].values()), f"{computed}"
        same(loaded, computed)
        row("another engine, another node", f"{PAGES * PAGE} of {len(first)} tokens loaded, same output and log-probabilities")
        again = computing.send({"tokens": altered})
        until_announced(cluster, 2 * RANKS * PAGES)
        cluster.flip_a_bit_in_every_page(0)
        recomputed = loading.send({"tokens": altered})
        noticed = cluster.metric(1, "larder_peer_fetches_total", outcome="checksum")
        assert not recomputed["cached"].get("storage") and noticed > 0, f"{recomputed}, {noticed}"
        same(recomputed, again)
        row("stored bytes altered behind its back", "computed, same output")
    cluster.stop()


def same(answer: dict, expected: dict) -> None:
    assert answer["tokens"] == expected["tokens"], f"other tokens: {answer}, {expected}"
    assert answer["logprobs"] == expected["logprobs"], f"other log-probabilities: {answer}, {expected}"


def until_announced(cluster: Cluster, pages: int) -> None:
    """Waits until the directory knows this many pages."""

    def rows() -> float:
        return sum(cluster.metric(node, "larder_directory_rows") for node in (0, 1))

    until(lambda: rows() >= pages, "the pages are announced")
