"""Starts the pods of manifests with podman, as a kubelet would: each container with its image, user, capabilities, environment,
command and mounts, on the network of its pod.

There is one host, and one pod of each workload. Network policies, probes' periods and memory limits are left out.
"""

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

from manifests import Manifests
from tools import ROOT, found, run

HOST = "host-1"
# Addresses for tests, on a bridge.
ADDRESSES = {"coordinator": "198.18.7.1", "node": "198.18.7.2"}
# Lower limits than podman's defaults, which not every machine allows.
LIMITS = ["--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096"]


class Pods:
    """Coordinator and node of these manifests, running in the image `larder` of a store."""

    def __init__(self, store, folder, documents):
        self.store, self.folder, self.all_ = store, folder, Manifests(documents)
        self.running, self.stack = {}, ExitStack()

    def __enter__(self):
        self.folder.mkdir(parents=True)
        with ExitStack() as failed:
            failed.callback(self.stack.close)
            self.network()
            for component in ["coordinator", "node"]:
                self.start(component)
            failed.pop_all()
        return self

    def __exit__(self, *_):
        self.stack.close()

    def network(self):
        """A namespace for each pod, and a cable between them."""
        ip = found("ip")
        self.spaces = {component: f"larder-{os.getpid()}-{component}" for component in ADDRESSES}
        for space in self.spaces.values():
            run(ip, "netns", "add", space)
            self.stack.callback(run, ip, "netns", "delete", space)
        one, other = self.spaces.values()
        run(ip, "-n", one, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", other)
        for component, space in self.spaces.items():
            run(ip, "-n", space, "address", "add", f"{ADDRESSES[component]}/24", "dev", "eth0")
            for link in ["lo", "eth0"]:
                run(ip, "-n", space, "link", "set", link, "up")

    def start(self, component):
        pod = self.pod(component)
        volumes = {volume["name"]: self.volume(component, volume) for volume in pod["volumes"]}
        for claim in self.all_.workload(component)["spec"].get("volumeClaimTemplates", []):
            volumes[claim["metadata"]["name"]] = self.owned(self.folder / component / "claim", pod)
        for container in pod.get("initContainers", []):
            run(*self.command(component, container, volumes), timeout=60)
        (container,) = pod["containers"]
        log = (self.folder / f"{component}.log").open("w")
        options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
        process = subprocess.Popen([str(word) for word in self.command(component, container, volumes)], **options)
        self.running[component] = process
        self.stack.callback(self.end, component)

    def end(self, component):
        """Ends a pod as the kubelet does: SIGTERM, and no more patience than the pod asks for."""
        process = self.running[component]
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=self.pod(component).get("terminationGracePeriodSeconds", 30))
        assert process.returncode == 0 or sys.exc_info()[0], f"{component}: {process.returncode}: {self.log(component)}"

    def pod(self, component):
        return self.all_.workload(component)["spec"]["template"]["spec"]

    def log(self, component):
        return (self.folder / f"{component}.log").read_text()

    def volume(self, component, volume):
        """The folder of a volume, filled."""
        pod, path = self.pod(component), self.folder / component / volume["name"]
        if "hostPath" in volume:
            path = self.folder / "host" / volume["hostPath"]["path"][1:]
            path.mkdir(parents=True, exist_ok=True)
            return path
        path.mkdir(parents=True)
        if "configMap" in volume:
            for name, text in self.all_.named("ConfigMap", volume["configMap"]["name"])["data"].items():
                (path / name).write_text(text)
        if "secret" in volume:
            for name, text in self.all_.named("Secret", volume["secret"]["secretName"])["data"].items():
                (path / name).write_bytes(base64.b64decode(text))
                (path / name).chmod(volume["secret"]["defaultMode"])
        return self.owned(path, pod)

    def owned(self, path, pod):
        """Does what `fsGroup` does."""
        path.mkdir(parents=True, exist_ok=True)
        run("chown", "--recursive", f":{pod['securityContext']['fsGroup']}", path)
        run("chmod", "g+rwxs", path)
        return path

    def command(self, component, container, volumes):
        pod = self.pod(component)
        security = pod["securityContext"] | container["securityContext"]
        environment = {one["name"]: one["value"] if "value" in one else self.field(component, one) for one in container.get("env", [])}
        mounts = {volumes[one["name"]]: one for one in container["volumeMounts"]}
        words = [*self.store.podman, "run", "--rm", "--name", self.name(component, container), *LIMITS]
        words += ["--network", f"ns:/var/run/netns/{self.spaces[component]}"]
        # The name of the coordinator's Service.
        words += ["--add-host", f"{self.all_.workload('coordinator')['spec']['serviceName']}:{ADDRESSES['coordinator']}"]
        words += ["--user", f"{security['runAsUser']}:{security['runAsGroup']}"]
        words += ["--cap-drop", "all"] + [f"--cap-add={one}" for one in security["capabilities"].get("add", [])]
        if security["readOnlyRootFilesystem"]:
            words += ["--read-only", "--read-only-tmpfs=false"]
        if not security["allowPrivilegeEscalation"]:
            words += ["--security-opt", "no-new-privileges"]
        for name, value in environment.items():
            words += ["--env", f"{name}={value}"]
        for path, mount in mounts.items():
            words += ["--volume", f"{path}:{mount['mountPath']}{':ro' if mount.get('readOnly') else ''}"]
        if "command" in container:
            words += ["--entrypoint", json.dumps(container["command"])]
        args = [re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], one) for one in container.get("args", [])]
        return [*words, "localhost/larder", *args]

    def field(self, component, variable):
        """A field of a pod, as the downward API has it."""
        names = {"node": "larder-node-abcde", "coordinator": "larder-coordinator-0"}
        path = variable["valueFrom"]["fieldRef"]["fieldPath"]
        known = {"spec.nodeName": HOST, "metadata.name": names[component], "status.podIP": ADDRESSES[component]}
        return known.get(path, "")

    def name(self, component, container):
        return f"larder-{os.getpid()}-{component}-{container['name']}"

    def execute(self, component, *command):
        """The output that `kubectl exec` would print."""
        (container,) = self.pod(component)["containers"]
        return run(*self.store.podman, "exec", self.name(component, container), *command, timeout=60)

    def as_engine(self, *command):
        """The output of a pod on the node's host that has the folder and the group of the sockets, and is not root."""
        group = self.pod("node")["securityContext"]["runAsGroup"]
        (sockets,) = [one["hostPath"]["path"] for one in self.pod("node")["volumes"] if one["name"] == "sockets"]
        words = [*self.store.podman, "run", "--rm", *LIMITS, "--network", f"ns:/var/run/netns/{self.spaces['node']}"]
        words += ["--user", "1000:1000", "--group-add", str(group), "--cap-drop", "all", "--read-only", "--tmpfs", "/tmp:mode=1777"]
        words += ["--volume", f"{self.folder}/host{sockets}:{sockets}:ro"]
        return run(*words, "localhost/larder", *command, timeout=120)

    def probe(self, component, kind):
        """Whether a probe of a pod succeeds."""
        (container,) = self.pod(component)["containers"]
        asked = container[kind]["httpGet"]
        (port,) = [one["containerPort"] for one in container["ports"] if one["name"] == asked["port"]]
        ask = f"import urllib.request as r; r.urlopen('http://{ADDRESSES[component]}:{port}{asked['path']}', timeout=5)"
        command = [found("ip"), "netns", "exec", self.spaces[component], sys.executable, "-c", ask]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def until_ready(self, seconds=60):
        """Waits until every probe succeeds."""
        deadline = time.monotonic() + seconds
        while waits := [(one, kind) for one in self.running for kind in ["readinessProbe", "livenessProbe"] if not self.probe(one, kind)]:
            for component, process in self.running.items():
                assert process.poll() is None, f"the {component} ended: {self.log(component)}"
            assert time.monotonic() < deadline, f"{waits} in {seconds} s: {[self.log(one) for one in self.running]}"
            time.sleep(0.3)


def run_and_serve(store, folder, documents):
    """Checks that the pods become ready, that commands in them work, that an engine's pod with its tenant's folder works, and
    that the pods end in order."""
    with Pods(store, folder, documents) as pods:
        pods.until_ready()
        status = json.loads(pods.execute("coordinator", "larder", "status", "--json"))
        assert [one["name"] for one in status["nodes"]] == [HOST], status
        assert "healthy" in pods.execute("node", "larder", "health")
        for component, command in page_commands():
            # A problem of this machine, which ends `larder doctor` with 1, is no fault of the command.
            pods.execute(component, "sh", "-c", f"{command} || [ $? = 1 ]")
        coordinator = f"{ADDRESSES['coordinator']}:7600"
        played = pods.as_engine("replay", "--coordinator", coordinator, "--requests", "300", "--quiet", "--json")
        played = json.loads(played)
        assert played["requests"] == 300 and played["token_hit_rate"] > 0, played
        return played


def page_commands():
    """The commands in pods with which the page on troubleshooting begins, with their components."""
    page = (ROOT / "docs/book/src/troubleshooting.md").read_text()
    commands = re.findall(r"^kubectl -n larder exec \S+?-(node|coordinator)(?:-0)? -- (.+)$", page, re.M)
    assert len(commands) == 2, commands
    return commands
