"""Engines and router as deploy/kubernetes/vllm starts them: its commands and environments, with the test's paths, up to a hit."""

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from contextlib import contextmanager

from driver import ROOT
from first_hour import WORDS, metrics, model_with_words
from scenarios import free_port, until

LOADED = 'prompt_tokens_by_source_total{source="external_kv_transfer"}'


def run(world, row) -> None:
    if shutil.which("kubectl") is None:
        row("the commands of deploy/kubernetes/vllm", "not run: there is no kubectl, which renders them")
        return
    engine, router = (container_of(name) for name in ("vllm", "larder-router"))
    model = model_with_words(world.scratch, "kubernetes")
    cluster = world.cluster("kubernetes", 1)
    port, port_of_router, port_of_status = free_port(), free_port(), free_port()
    here = {
        "$(MODEL)": str(model),
        "/run/larder/larder.sock": cluster.sockets[0],
        "--max-model-len=8192": "--max-model-len=2048",
        "larder-coordinator.larder:7600": cluster.coordinator,
        "http://engines:8000": f"http://127.0.0.1:{port}",
        "0.0.0.0:8080": f"127.0.0.1:{port_of_router}",
        "0.0.0.0:8081": f"127.0.0.1:{port_of_status}",
        "--leave-seconds=10": "--leave-seconds=0",
    }
    body = {"model": str(model), "max_tokens": 4, "temperature": 0}
    body["prompt"] = " ".join(f"word{n % WORDS}" for n in range(600))
    answers, loaded = [], []
    with running(world, "router", router, here):
        # The router runs on while the engine is restarted, as on the page.
        for life in range(2):
            with running(world, f"engine-{life}", engine, here, f"--port={port}", "--enforce-eager"):
                until(lambda: is_ready(port_of_status), "the router has an engine", patience=400)
                answers.append(ask(port_of_router, body))
                saved = "larder_saved_chunks_total" if life == 0 else "larder_loads_total"
                # vLLM learns of saved chunks with its steps.
                until(lambda saved=saved: metrics_of(port).get(saved) or ask(port_of_router, body) is None, "KV moved", 60)
                loaded.append(metrics_of(port).get(LOADED, 0))
            until(lambda: not is_ready(port_of_status), "the router knows that its engine is gone")
    cluster.stop()
    assert answers[0] == answers[1], f"{answers}"
    assert loaded == [0, 512], f"{loaded}"
    row("the commands of deploy/kubernetes/vllm", "engine and router start; 512 of 600 tokens are loaded after a restart")


def container_of(name: str) -> dict:
    """The container of a Deployment of the overlay for CPUs."""
    import yaml

    overlay = ROOT / "deploy/kubernetes/vllm/cpu"
    done = subprocess.run(["kubectl", "kustomize", overlay], capture_output=True, text=True, check=True)
    (found,) = [
        one["spec"]["template"]["spec"]["containers"]
        for one in yaml.safe_load_all(done.stdout)
        if one["kind"] == "Deployment" and one["metadata"]["labels"]["app.kubernetes.io/name"] == name
    ]
    return found[0]


@contextmanager
def running(world, name: str, container: dict, here: dict[str, str], *more: str):
    """Runs a container's command, until SIGTERM."""
    assert container["command"][0] == "python3"
    arguments = [there(argument, here) for argument in container["args"]]
    environment = {one["name"]: one["value"] for one in container.get("env", []) if one["name"] not in ("HOME", "HF_HOME")}
    environment = os.environ | environment | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    log = world.scratch / f"kubernetes-{name}.log"
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, *container["command"][1:], *arguments, *more], stdout=output, stderr=output, env=environment
        )
    try:
        yield
    except BaseException:
        print("".join(log.read_text().splitlines(keepends=True)[-30:]))
        raise
    finally:
        process.terminate()
        process.wait(timeout=120)


def there(argument: str, here: dict[str, str]) -> str:
    for old, new in here.items():
        argument = argument.replace(old, new)
    left = re.search(r"\$\(\w+\)|/run/larder", argument)
    assert left is None, f"{left[0]} is not replaced"
    return argument


def is_ready(port: int) -> bool:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5).status == 200
    except OSError:
        return False


def ask(port: int, body: dict) -> str:
    data = json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", data, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["text"]


def metrics_of(port: int) -> dict[str, float]:
    return metrics(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode())
