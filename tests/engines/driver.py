"""The parts of scenarios: a development cluster and engines, in processes of their own."""

import atexit
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from process import Process

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LARDER = Path(os.environ.get("LARDER", ROOT / "target/debug/larder"))
BLOCK_TOKENS = 32


class Cluster:
    """A running `larder dev`, in `folder` so that its sockets are known before it starts."""

    def __init__(self, folder: Path, nodes: int, arena: str = "256MiB", log: str = "info", options: Sequence[str] = ()):
        command = [LARDER, "dev", "--json", "--dir", folder, "--nodes", str(nodes), "--arena-bytes", arena, *options]
        self.folder = folder
        output = open(folder.with_suffix(".log"), "w")
        environment = os.environ | {"LARDER_LOG": log}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output, env=environment, text=True)
        atexit.register(self.stop)
        ready = json.loads(self.process.stdout.readline())
        self.coordinator = ready["coordinator"]
        self.http = [node["http"] for node in ready["nodes"]]
        self.sockets = [next(iter(node["sockets"].values())) for node in ready["nodes"]]

    def node_log(self, node: int) -> Path:
        """The file of a node's log."""
        return self.folder / f"node-{node}.log"

    def pid(self, node: int) -> int:
        """The process that serves a node's socket."""
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                command = (entry / "cmdline").read_text().split("\0")
            except OSError:
                continue
            if f"node-{node}.toml" in " ".join(command) and str(self.process.pid) == parent(entry):
                return int(entry.name)
        raise RuntimeError(f"node {node} does not run")

    def kill(self, node: int) -> None:
        """Kills a node; the cluster starts it again."""
        os.kill(self.pid(node), signal.SIGKILL)

    def metric(self, node: int, name: str, **labels: str) -> float:
        """The sum of a node's samples of this name with these labels."""
        return metric_at(self.http[node], name, labels)

    def flip_a_bit_in_every_page(self, node: int) -> None:
        """Alters every block of a node behind its back, through its memory as a debugger would."""
        pid = self.pid(node)
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
            for line in maps:
                if "memfd:larder-arena" not in line:
                    continue
                start, end = (int(number, 16) for number in line.split()[0].split("-"))
                for place in range(start + 1_234, end, 4_096):
                    memory.seek(place)
                    byte = memory.read(1)[0]
                    memory.seek(place)
                    memory.write(bytes([byte ^ 0x10]))

    def stop(self) -> None:
        """Ends the cluster, once."""
        atexit.unregister(self.stop)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=60)


class Node:
    """A node of its own, with configuration that a development cluster does not take."""

    def __init__(self, scratch: Path, name: str, config: str):
        folder = scratch / name
        folder.mkdir()
        self.socket = str(folder / "node.sock")
        text = f'name = "{name}"\n[http]\nlisten = "127.0.0.1:0"\n[host]\narena_bytes = "64MiB"\n{config}'
        (folder / "node.toml").write_text(f'{text}[[tenants]]\nname = "default"\nsocket = "{self.socket}"\n')
        command = [LARDER, "node", "--config", folder / "node.toml"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=open(folder / "node.log", "w"), text=True)
        atexit.register(self.stop)
        self.http = json.loads(self.process.stdout.readline())["http"]

    def status(self) -> dict:
        with urllib.request.urlopen(f"http://{self.http}/status") as answer:
            return json.load(answer)

    def metric(self, name: str, **labels: str) -> float:
        """As the metric of a cluster's node."""
        return metric_at(self.http, name, labels)

    def stop(self) -> None:
        """Ends the node, once."""
        atexit.unregister(self.stop)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=60)


class Engine(Process):
    """A vLLM engine in a process of its own."""

    def __init__(
        self,
        scratch: Path,
        name: str,
        connector: dict | None = None,
        faults: dict | None = None,
        role: str = "kv_both",
        **options,
    ):
        options = {
            "model": str(scratch / "model"),
            "dtype": "bfloat16",
            "max_model_len": 4_000,
            "block_size": BLOCK_TOKENS,
            "max_num_batched_tokens": 4_096,
        } | options
        if connector is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "LarderConnector",
                "kv_connector_module_path": "faulty" if faults is not None else "larder_kv.vllm",
                "kv_role": role,
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"chunk_tokens": BLOCK_TOKENS} | connector,
            }
        binding = options.pop("environment", {})
        ranks = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
        if ranks > 1:
            # One process for each rank, on a processor of its own.
            options["distributed_executor_backend"] = "mp"
            processors = sorted(os.sched_getaffinity(0))
            bound = [processors[rank % len(processors)] for rank in range(ranks)]
            binding = binding | {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, bound))}
        path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | binding | {"LARDER_FAULTS": json.dumps(faults or {}), "PYTHONPATH": path}
        super().__init__(scratch, name, [sys.executable, HERE / "vllm_engine.py", json.dumps(options)], environment)

    def ask(self, *prompts: list[int], **options) -> dict:
        """Runs prompts, and returns the answers and the counts."""
        self.tell(*prompts, **options)
        return self.answer()

    def tell(self, *prompts: list[int], **options) -> None:
        """The same, without waiting for the answers."""
        self.write({"prompts": prompts, **options})

    @contextlib.contextmanager
    def dying(self):
        """For an engine that is to end by itself, without an answer."""
        try:
            self.answer()
            yield self
            self.process.wait(timeout=60)
        finally:
            self.process.kill()


def metric_at(http: str, name: str, labels: dict[str, str]) -> float:
    """The sum of the samples of this name with these labels."""
    with urllib.request.urlopen(f"http://{http}/metrics") as answer:
        text = answer.read().decode()
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    samples = re.findall(rf"^{name}(\{{.*\}})? (\S+)$", text, re.MULTILINE)
    return sum(float(value) for found, value in samples if all(one in found for one in wanted))


def parent(entry: Path) -> str:
    return (entry / "stat").read_text().rsplit(")", 1)[1].split()[1]


def scratch_folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="larder-engines-")
