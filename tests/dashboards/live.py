"""A development cluster under replay, and a Prometheus that scrapes it."""

import json
import re
import signal
import socket
import subprocess
import time
import urllib.parse
import urllib.request

NODES = 3
# So small that they evict, and fetch from each other and from disk.
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
        self.log = (folder / "dev.log").open("w")
        self.process = subprocess.Popen(
            [larder, "dev", *DEV, *more, "--dir", folder / "dev"], stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        line = self.process.stdout.readline()
        assert line, (folder / "dev.log").read_text()
        told = json.loads(line)
        self.coordinator = told["coordinator"]
        self.nodes = {node["name"]: node["http"] for node in told["nodes"]}

    def metrics(self):
        servers = self.nodes | {"coordinator": self.coordinator}
        return {name: get(f"http://{http}/metrics") for name, http in servers.items()}

    def replay(self, seconds):
        """Plays one generated trace again and again; how many requests that were."""
        started, played = time.monotonic(), 0
        while time.monotonic() - started < seconds:
            command = [self.larder, "replay", "--coordinator", self.coordinator, *REPLAY]
            ran = subprocess.run(command, text=True, capture_output=True, check=False)
            assert ran.returncode == 0, ran.stdout + ran.stderr
            played += json.loads(ran.stdout)["requests"]
        return played


class Prometheus(Process):
    """Scrapes clusters, by name, and evaluates rules as often."""

    def __init__(self, clusters, folder, rules, interval="1s"):
        address = f"127.0.0.1:{free_port()}"
        self.url = f"http://{address}"
        self.started = time.time()
        targets = []
        for label, cluster in clusters.items():
            targets += [
                {"targets": [http], "labels": {"cluster": label, "node": name}} for name, http in cluster.nodes.items()
            ]
            targets.append({"targets": [cluster.coordinator], "labels": {"cluster": label}})
        # JSON is YAML.
        config = {
            "global": {"scrape_interval": interval, "evaluation_interval": interval},
            "rule_files": [str(path) for path in rules],
            "scrape_configs": [{"job_name": "larder", "static_configs": targets}],
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
        # What happens only once, as the first play of a trace does, is seen by who has seen what was before.
        while not (self.is_ready() and self.has_scraped(len(targets))):
            assert self.process.poll() is None and time.monotonic() < deadline, (folder / "prometheus.log").read_text()
            time.sleep(0.05)

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
        """What `label_values(...)` gives in Grafana."""
        series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", query).groups()
        return self.api(f"label/{label}/values", **{"match[]": series})


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
