"""A development cluster under replay, and a Prometheus that scrapes it."""

import json
import re
import runpy
import signal
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COUNTS = Path(__file__).resolve().parents[2] / "client/python/python/larder_kv/vllm/counts.py"

NODES = 3
# So small that nodes evict, and fetch from each other and from disk.
DEV = ["--nodes", str(NODES), "--chunks-per-node", "600", "--block-bytes", "16384", "--disk-bytes", "64MiB", "--json"]
REPLAY = ["--block-bytes", "16384", "--requests", "1500", "--quiet", "--json"]


def get(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


class Process:
    """A process that ends with its block."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Cluster(Process):
    def __init__(self, larder, folder, more=()):
        self.larder = larder
        self.folder = folder / "dev"
        self.log = (folder / "dev.log").open("w")
        self.process = subprocess.Popen(
            [larder, "dev", *DEV, *more, "--dir", self.folder], stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        line = self.process.stdout.readline()
        assert line, (folder / "dev.log").read_text()
        told = json.loads(line)
        self.coordinator = told["coordinator"]
        self.nodes = {node["name"]: node["http"] for node in told["nodes"]}

    def metrics(self):
        servers = self.nodes | {"coordinator": self.coordinator}
        return {name: get(f"http://{http}/metrics") for name, http in servers.items()}

    def forget_all(self):
        """Purges every chunk. Played again, a trace misses what an infinite cache would have: else all of it may be hit."""
        command = [self.larder, "purge", "--coordinator", self.coordinator, "--tenant", "default"]
        admin = ["--ca", self.folder / "ca.pem", "--certificate", self.folder / "admin.pem", "--key", self.folder / "admin.key"]
        ran = subprocess.run([*command, *admin], text=True, capture_output=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr

    def replay(self, seconds):
        """Plays one generated trace again and again; returns the number of requests."""
        started, played = time.monotonic(), 0
        while time.monotonic() - started < seconds:
            command = [self.larder, "replay", "--coordinator", self.coordinator, *REPLAY]
            ran = subprocess.run(command, text=True, capture_output=True, check=False)
            assert ran.returncode == 0, ran.stdout + ran.stderr
            played += json.loads(ran.stdout)["requests"]
        return played


class Engine:
    """Stands in for an engine of vLLM: exports the connector's counters under vLLM's labels; all of them grow."""

    def __enter__(self):
        counts = runpy.run_path(str(COUNTS))
        engine = self
        self.scrapes = 0

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self):
                engine.scrapes += 1
                self.send_response(200)
                self.send_header("content-type", "text/plain; version=0.0.4")
                self.end_headers()
                for name, meaning in counts["COUNTERS"].items():
                    metric = f"vllm:larder_{name}_total"
                    text = f"# HELP {metric} {meaning}\n# TYPE {metric} counter\n"
                    self.wfile.write(f'{text}{metric}{{engine="0",model_name="m"}} {engine.scrapes}\n'.encode())

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.http = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()


class Prometheus(Process):
    """Scrapes clusters, by name, and engines, and evaluates rules at the same interval."""

    def __init__(self, clusters, folder, rules, interval="1s", engines=()):
        address = f"127.0.0.1:{free_port()}"
        self.url = f"http://{address}"
        self.started = time.time()
        # Prometheus reads these files again when they change.
        self.targets = folder / "targets"
        self.targets.mkdir()
        for label, cluster in clusters.items():
            self.scrape(label, cluster, engines)
        # JSON is YAML.
        config = {
            "global": {"scrape_interval": interval, "evaluation_interval": interval},
            "rule_files": [str(path) for path in rules],
            "scrape_configs": [{"job_name": "larder", "file_sd_configs": [{"files": [f"{self.targets}/*.json"]}]}],
        }
        path = folder / "prometheus.yml"
        path.write_text(json.dumps(config))
        checked = subprocess.run(
            ["promtool", "check", "config", path], text=True, capture_output=True, check=False
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr
        command = ["prometheus", f"--config.file={path}", f"--storage.tsdb.path={folder / 'tsdb'}"]
        with (folder / "prometheus.log").open("w") as log:
            self.process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        # An event that happens only once, such as the first play of a trace, is visible only if the state before it was scraped.
        targets = sum(len(cluster.nodes) + 1 + len(engines) for cluster in clusters.values())
        while not (self.is_ready() and self.has_scraped(targets)):
            assert self.process.poll() is None and time.monotonic() < deadline, (folder / "prometheus.log").read_text()
            time.sleep(0.05)

    def scrape(self, label, cluster, engines=()):
        """Scrapes a cluster, and engines, from now on."""
        targets = [{"targets": [http], "labels": {"cluster": label, "node": name}} for name, http in cluster.nodes.items()]
        others = [cluster.coordinator, *(engine.http for engine in engines)]
        targets += [{"targets": [http], "labels": {"cluster": label}} for http in others]
        # Written in one step: Prometheus may read at any time.
        (self.targets / "new").write_text(json.dumps(targets))
        (self.targets / "new").rename(self.targets / f"{label}.json")

    def scrape_no_more(self, label):
        (self.targets / f"{label}.json").unlink(missing_ok=True)

    def is_ready(self):
        try:
            return get(f"{self.url}/-/ready") != ""
        except OSError:
            return False

    def has_scraped(self, targets):
        return len(self.api("query", query="up")["result"]) == targets

    def api(self, path, **parameters):
        answer = json.loads(get(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters, doseq=True)}"))
        assert answer["status"] == "success", answer
        return answer["data"]

    def range(self, query):
        """The series that answer a query, over the whole run."""
        now = time.time()
        return self.api("query_range", query=query, start=self.started, end=now, step=1)["result"]

    def names(self):
        return set(self.api("label/__name__/values"))

    def rules(self):
        groups = self.api("rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def values(self, query):
        """The values that `label_values(...)` has in Grafana."""
        series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", query).groups()
        return self.api(f"label/{label}/values", **{"match[]": series})


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
