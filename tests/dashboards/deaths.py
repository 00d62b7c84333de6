"""Clusters whose processes die, as hosts do: nobody starts them again. Which alerts fire, and how soon."""

import json
import signal
import subprocess
import time

import live

# As operators scrape, not as fast as a test could.
SCRAPE_SECONDS = 15
# The most that an alert about a dead process may take.
WITHIN_SECONDS = 120
# LarderCoordinatorGone waits for two minutes by itself: a coordinator that starts again is no trouble.
COORDINATOR_WITHIN_SECONDS = 180
# `larder health` asks every node.
HEALTH_SECONDS = 10
# Silence after which a node is suspect.
SUSPECT_SECONDS = 3


class Cluster:
    """A coordinator and two nodes, each a process of its own."""

    def __init__(self, larder, folder):
        self.larder, self.folder, self.running = larder, folder, {}
        folder.mkdir()
        self.ca("init")
        self.ca("issue", "coordinator", "main")
        files = self.credentials("main")
        ready = self.start("coordinator", "main", f"""
            [http]
            listen = "127.0.0.1:0"
            [state]
            path = "{folder}/state.redb"
            [peer]
            listen = "127.0.0.1:0"
            {files}""")
        self.coordinator, self.nodes = ready["http"], {}
        for name in ["a", "b"]:
            self.ca("issue", "node", name)
            files = self.credentials(name)
            started = self.start("node", name, f"""
                name = "{name}"
                [http]
                listen = "127.0.0.1:0"
                [host]
                arena_bytes = "16MiB"
                [[tenants]]
                name = "default"
                socket = "{folder}/{name}.sock"
                [cluster]
                coordinator = "{ready["peer"]}"
                listen = "127.0.0.1:0"
                staging_bytes = "2MiB"
                {files}""")
            self.nodes[name] = started["http"]

    def ca(self, *args):
        command = [self.larder, "ca", *args, "--dir", self.folder / "ca"]
        ran = subprocess.run(command, text=True, capture_output=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr

    def credentials(self, name):
        folder = self.folder / "ca"
        return f"""ca = "{folder}/ca.pem"
            certificate = "{folder}/{name}.pem"
            key = "{folder}/{name}.key\""""

    def start(self, kind, name, config):
        path = self.folder / f"{name}.toml"
        path.write_text(config)
        log = (self.folder / f"{name}.log").open("w")
        command = [self.larder, kind, "--config", path]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        self.running[name] = process
        line = process.stdout.readline()
        assert line, (self.folder / f"{name}.log").read_text()
        return json.loads(line)

    def kill(self, name):
        self.running[name].kill()
        self.running[name].wait()

    def stop_for(self, name, seconds):
        """Lets a node stand still, as on a host without CPU time."""
        self.running[name].send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.running[name].send_signal(signal.SIGCONT)

    def health(self):
        """The word and the exit status of `larder health`."""
        command = [self.larder, "health", "--coordinator", self.coordinator]
        ran = subprocess.run(command, text=True, capture_output=True, check=False)
        return ran.stdout.strip(), ran.returncode

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.running.values():
            process.kill()
            process.wait()


def alerts(larder, folder, rules):
    """Kills a node of one cluster and the coordinator of another; yields the alerts, and after how many seconds they fired."""
    with Cluster(larder, folder / "one") as one, Cluster(larder, folder / "two") as two:
        clusters = {"one": one, "two": two}
        wait("both clusters are whole", lambda: all(of.health() == ("healthy", 0) for of in clusters.values()))
        with live.Prometheus(clusters, folder, rules, f"{SCRAPE_SECONDS}s") as prometheus:
            assert not firing(prometheus), firing(prometheus)
            died = time.monotonic()
            one.kill("a")
            two.kill("main")
            wait("the first is degraded", lambda: one.health() == ("degraded", 1), HEALTH_SECONDS)
            wait("the second is down", lambda: two.health() == ("down", 1), HEALTH_SECONDS)
            for _ in range(3):
                one.stop_for("b", SUSPECT_SECONDS + 1)
                time.sleep(SUSPECT_SECONDS)
            for alert, cluster, within in [
                ("LarderMemberLost", "one", WITHIN_SECONDS),
                ("LarderMemberSuspect", "one", WITHIN_SECONDS),
                ("LarderTargetUnreachable", "one", WITHIN_SECONDS),
                ("LarderTargetUnreachable", "two", WITHIN_SECONDS),
                ("LarderCoordinatorGone", "two", COORDINATOR_WITHIN_SECONDS),
            ]:
                fires = lambda: (alert, cluster) in firing(prometheus)
                wait(f"{alert} fires", fires, died + within - time.monotonic())
                yield alert, cluster, time.monotonic() - died


def firing(prometheus):
    found = prometheus.api("alerts")["alerts"]
    return {(one["labels"]["alertname"], one["labels"].get("cluster")) for one in found if one["state"] == "firing"}


def wait(what, holds, seconds=60):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.2)
