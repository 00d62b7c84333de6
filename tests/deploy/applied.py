"""Applies manifests to a real API server of Kubernetes, beside an etcd of its own.

Debian's sources have Kubernetes 1.20. It knows PodDisruptionBudget as policy/v1beta1 and without `unhealthyPodEvictionPolicy`:
only this is changed in the documents. For custom resources it has the names of the definitions but no schemas; other checks have
the schemas.
"""

import copy
import json
import os
import re
import subprocess
import time

from live import free_ports, larder
from manifests import ISSUED_SECRETS
from schemas import CRDS
from tools import ROOT, TOOLS, Missing, found, run

PROGRAM = TOOLS / "kubernetes/kube-apiserver"
HOSTS = ["host-1", "host-2.example"]
ADMIN = "admin"


class ApiServer:
    """A running API server. It has no controllers: applied workloads are not started."""

    def __init__(self, folder):
        if not PROGRAM.exists():
            raise Missing("no API server is built: tests/deploy/apiserver builds it")
        self.folder, self.processes = folder, []
        folder.mkdir()
        etcd, peer, port, _ = free_ports()
        self.config = folder / "kubeconfig"
        self.start("etcd", found("etcd"), *self.etcd(etcd, peer))
        self.start("apiserver", PROGRAM, *self.server(etcd, port))
        self.write_config(port)

    def __enter__(self):
        deadline = time.monotonic() + 120
        while not self.serves():
            ended = [log.read_text()[-2000:] for process, log in self.processes if process.poll() is not None]
            assert not ended and time.monotonic() < deadline, ended or "not within 120 s: the API server serves"
            time.sleep(0.5)
        return self

    def __exit__(self, *_):
        for process, _ in reversed(self.processes):
            process.kill()
            process.wait()

    def etcd(self, client, peer):
        here, there = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
        yield from ["--name", "s", "--data-dir", self.folder / "etcd", "--unsafe-no-fsync", "--logger", "zap"]
        yield from ["--listen-client-urls", here, "--advertise-client-urls", here]
        yield from ["--listen-peer-urls", there, "--initial-advertise-peer-urls", there, "--initial-cluster", f"s={there}"]

    def server(self, etcd, port):
        certificate, key = self.folder / "server.pem", self.folder / "server.key"
        name = ["-subj", "/CN=kube-apiserver", "-addext", "subjectAltName=IP:127.0.0.1"]
        made = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-keyout", key, "-out", certificate]
        run(found("openssl"), *made, *name)
        (self.folder / "tokens.csv").write_text(f'{ADMIN},{ADMIN},1,"system:masters"\n')
        yield from [f"--etcd-servers=http://127.0.0.1:{etcd}", f"--secure-port={port}", "--bind-address=127.0.0.1"]
        yield from [f"--tls-cert-file={certificate}", f"--tls-private-key-file={key}", f"--cert-dir={self.folder}"]
        yield from [f"--service-account-key-file={certificate}", f"--service-account-signing-key-file={key}"]
        yield from ["--service-account-issuer=https://kubernetes.default.svc", "--service-cluster-ip-range=10.0.0.0/24"]
        yield from [f"--token-auth-file={self.folder}/tokens.csv", "--endpoint-reconciler-type=none", "--authorization-mode=RBAC"]
        yield "--disable-admission-plugins=ServiceAccount"

    def start(self, name, program, *arguments):
        log = self.folder / f"{name}.log"
        with log.open("w") as to:
            options = {"stdin": subprocess.DEVNULL, "stdout": to, "stderr": to, "start_new_session": True}
            process = subprocess.Popen([str(word) for word in (program, *arguments)], **options)
        self.processes.append((process, log))

    def write_config(self, port):
        authority = str(self.folder / "server.pem")
        cluster = {"server": f"https://127.0.0.1:{port}", "certificate-authority": authority}
        context = {"cluster": "test", "user": "test", "namespace": "larder"}
        self.config.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "test",
                    "clusters": [{"name": "test", "cluster": cluster}],
                    "users": [{"name": "test", "user": {"token": ADMIN}}],
                    "contexts": [{"name": "test", "context": context}],
                }
            )
        )

    def kubectl(self, *arguments, **options):
        command = [found("kubectl"), "--kubeconfig", self.config, "--cache-dir", self.folder / "cache"]
        return run(*command, *arguments, **options)

    def serves(self):
        try:
            self.kubectl("get", "namespace", "default")
        except AssertionError:
            return False
        return True

    def apply(self, documents):
        """Applies documents, and compares them with what the server has then; returns their number. Deletes them again."""
        documents = [as_known(one) for one in documents]
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": documents})
        self.kubectl("apply", "--server-side", "--force-conflicts", "--filename", "-", input=text)
        stored = json.loads(self.kubectl("get", "--output", "json", "--filename", "-", input=text))
        # A single document does not come as a list.
        stored = {name_of(one): one for one in stored.get("items", [stored])}
        assert len(stored) == len(documents), "the server has others"
        for sent in documents:
            wrong = list(lost(sent, stored[name_of(sent)]))
            assert not wrong, f"{sent['kind']} {sent['metadata']['name']}: the server dropped or changed {wrong}"
        # A namespace is not deleted without a controller.
        others = [one for one in documents if one["kind"] != "Namespace"]
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": others})
        self.kubectl("delete", "--wait=false", "--cascade=background", "--filename", "-", input=text)
        return len(documents)

    def define_custom_resources(self):
        plural = {"ServiceMonitor": "servicemonitors", "PrometheusRule": "prometheusrules"}
        plural |= {"Certificate": "certificates", "Issuer": "issuers"}
        free = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        for kind, (_, version) in CRDS.items():
            group, _, name = version.partition("/")
            names = {"kind": kind, "plural": plural[kind], "singular": kind.lower()}
            served = {"name": name, "served": True, "storage": True, "schema": {"openAPIV3Schema": free}}
            document = {
                "apiVersion": "apiextensions.k8s.io/v1",
                "kind": "CustomResourceDefinition",
                "metadata": {"name": f"{plural[kind]}.{group}"},
                "spec": {"group": group, "names": names, "scope": "Namespaced", "versions": [served]},
            }
            self.kubectl("apply", "--filename", "-", input=json.dumps(document))
            self.kubectl("wait", "--for=condition=established", "--timeout=60s", f"crd/{plural[kind]}.{group}")

    def issue(self):
        """Runs deploy/kubernetes/certificates with the API server's own hosts; returns the Secrets that it made."""
        for host in HOSTS:
            labels = {"kubernetes.io/os": "linux", "larder-node": "true"}
            document = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": host, "labels": labels}}
            self.kubectl("apply", "--filename", "-", input=json.dumps(document))
        programs = self.folder / "bin"
        programs.mkdir()
        (programs / "larder").symlink_to(larder())
        environment = os.environ | {"KUBECONFIG": str(self.config), "PATH": f"{programs}:{os.environ['PATH']}"}
        script = ROOT / "deploy/kubernetes/certificates"
        run(script, self.folder / "ca", "larder-node=true", env=environment)
        secrets = json.loads(self.kubectl("--namespace", "larder", "get", "secrets", "--output", "json"))["items"]
        made = {one["metadata"]["name"]: set(one["data"]) for one in secrets if one["type"] == "Opaque"}
        assert set(made) == ISSUED_SECRETS, made
        wanted = {f"{host}.{ending}" for host in HOSTS for ending in ["pem", "key"]} | {"ca.pem"}
        assert made["larder-node-certificates"] == wanted, made
        return made


def all_of(folder, clusters):
    """Applies every cluster's documents, and a broken document of each kind, which must be refused; returns a summary."""
    with ApiServer(folder / "apiserver") as server:
        for namespace in ["larder", "vllm"]:
            server.kubectl("create", "namespace", namespace)
        server.define_custom_resources()
        secrets = server.issue()
        count = sum(server.apply(documents) for documents in clusters.values())
        refused = list(broken(next(iter(clusters.values()))))
        for what, document in refused:
            try:
                server.apply([document])
            except AssertionError:
                continue
            raise AssertionError(f"accepted: {what}")
        version = json.loads(server.kubectl("version", "--output", "json"))["serverVersion"]["gitVersion"]
    return f"{count} documents of {len(clusters)} renderings, kept as they were sent by Kubernetes {version}; " + (
        f"{len(secrets)} Secrets of the script `certificates`; {len(refused)} broken ones refused"
    )


def broken(documents):
    """Documents that a server must refuse, or change."""
    for kind, what, change in [
        ("DaemonSet", "a selector of other labels", lambda spec: spec["selector"]["matchLabels"].update(app="x")),
        ("DaemonSet", "a field that does not exist", lambda spec: spec.update(replicas=3)),
        ("StatefulSet", "replicas that are a word", lambda spec: spec.update(replicas="one")),
        ("Service", "a port that is too large", lambda spec: spec["ports"][0].update(port=70000)),
        ("NetworkPolicy", "a misspelt selector", lambda spec: spec.update(podSelectors=spec.pop("podSelector"))),
    ]:
        document = copy.deepcopy(next(one for one in documents if one["kind"] == kind))
        change(document["spec"])
        yield f"{kind}: {what}", document


def as_known(document):
    """A document as Kubernetes 1.20 knows it, in a namespace."""
    document = copy.deepcopy(document)
    if document["kind"] == "PodDisruptionBudget":
        document["apiVersion"] = "policy/v1beta1"
        document["spec"].pop("unhealthyPodEvictionPolicy", None)
    if document["kind"] != "Namespace":
        document["metadata"].setdefault("namespace", "larder")
    return document


def name_of(document):
    return document["kind"], document["metadata"].get("namespace"), document["metadata"]["name"]


def lost(sent, kept, path=""):
    """The places at which the server lacks what was sent."""
    if isinstance(sent, dict) and isinstance(kept, dict):
        for key, value in sent.items():
            if key in kept:
                yield from lost(value, kept[key], f"{path}.{key}")
            # The server drops empty maps and lists.
            elif value not in (None, {}, [], ""):
                yield f"{path}.{key}"
    elif isinstance(sent, list) and isinstance(kept, list) and len(sent) == len(kept):
        for number, (one, other) in enumerate(zip(sent, kept)):
            yield from lost(one, other, f"{path}[{number}]")
    elif sent != kept and quantity(sent) != quantity(kept):
        yield f"{path}: {sent!r}, kept as {kept!r}"


def quantity(value):
    """A quantity as a number: 1024Mi and 1Gi are the same."""
    found = re.fullmatch(r"(\d+)(m|Ki|Mi|Gi|Ti)?", str(value))
    factors = {"m": 0.001, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, None: 1}
    return int(found[1]) * factors[found[2]] if found else (type(value), value)
