"""Clusters of processes that nobody starts again when they die."""

import json
import os
import re
import signal
import subprocess
import time

from live import free_port


class Cluster:
    """A coordinator and some nodes, each a process of its own."""

    def __init__(self, larder, folder, names=("a", "b"), coordinator="", node="", days=365, cables=None, environment=None):
        """`coordinator` and `node` are sections for their configurations. `days` is the validity of the nodes' certificates. The
        function `cables` makes the address at which others see a node. `environment` is added to this process's own environment,
        for nodes."""
        self.larder, self.folder, self.running = larder, folder, {}
        self.sections, self.days, self.cables = node, days, cables
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
            {files}
            {coordinator}""")
        self.coordinator, self.peer, self.nodes = ready["http"], ready["peer"], {}
        for name in names:
            self.ca("issue", "node", name, "--days", str(days))
            self.start_node(name, environment=environment)

    def start_node(self, name, coordinator=None, process=None, environment=None):
        """Starts a node; `process` is the name of the process if two processes have the node's name."""
        process = process or name
        address = f"127.0.0.1:{free_port()}" if self.cables else "127.0.0.1:0"
        advertise = f'advertise = "{self.cables(name, address)}"' if self.cables else ""
        started = self.start("node", process, f"""
            name = "{name}"
            [http]
            listen = "127.0.0.1:0"
            [host]
            arena_bytes = "16MiB"
            extent_bytes = "2MiB"
            [[tenants]]
            name = "default"
            socket = "{self.socket(process)}"
            {self.sections.replace("{dir}", str(self.folder / process))}
            [cluster]
            coordinator = "{coordinator or self.peer}"
            listen = "{address}"
            {advertise}
            staging_bytes = "2MiB"
            {self.credentials(name)}""", environment)
        self.nodes[process] = started["http"]

    def socket(self, name):
        return self.folder / f"{name}.sock"

    def ca(self, *args):
        command = [self.larder, "ca", *args, "--dir", self.folder / "ca"]
        ran = subprocess.run(command, text=True, capture_output=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr

    def credentials(self, name):
        folder = self.folder / "ca"
        return f"""ca = "{folder}/ca.pem"
            certificate = "{folder}/{name}.pem"
            key = "{folder}/{name}.key\""""

    def start(self, kind, name, config, environment=None):
        path = self.folder / f"{name}.toml"
        path.write_text(config)
        log = self.folder / f"{name}.log"
        command = [self.larder, kind, "--config", path]
        with log.open("w") as to:
            options = {"stdout": subprocess.PIPE, "stderr": to, "text": True, "env": os.environ | (environment or {})}
            self.running[name] = subprocess.Popen(command, **options)
        line = self.running[name].stdout.readline()
        assert line, log.read_text()
        return json.loads(line)

    def pid(self, name):
        return self.running[name].pid

    def kill(self, name):
        self.running[name].kill()
        self.running[name].wait()

    def restart(self, name):
        """Kills a node, and starts it again at the same address of HTTP."""
        self.kill(name)
        config = (self.folder / f"{name}.toml").read_text()
        at_same = re.sub(r'(\[http\]\s+listen =) ".*"', rf'\1 "{self.nodes[name]}"', config)
        self.start("node", name, at_same)

    def signal(self, name, which):
        self.running[name].send_signal(which)

    def stop_for(self, name, seconds):
        """Stops a node for some time, as on a host without CPU time."""
        self.signal(name, signal.SIGSTOP)
        time.sleep(seconds)
        self.signal(name, signal.SIGCONT)

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
