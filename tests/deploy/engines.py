"""Checks the manifests of engines and routers against each other, Larder's manifests, and the Python package."""

import json
import re
from pathlib import PurePosixPath as Posix
from urllib.parse import urlsplit

from manifests import allowed, selects
from tools import ROOT

PACKAGE = ROOT / "client/python/python/larder_kv"


def roles(documents):
    """The roles of the engines, in order."""
    return sorted(transfer(pod)["kv_role"] for pod in map(pod_of, workloads(documents, "vllm")))


def problems(documents, larder):
    """All problems of these manifests beside Larder's, one line each."""
    return [f"{check.__name__}: {line}" for check in [engines, routers] for line in check(documents, larder)]


def engines(documents, larder):
    known = {name for file in ["settings.py", "vllm/settings.py"] for name in fields((PACKAGE / file).read_text())}
    node = larder.workload("node")["spec"]["template"]["spec"]
    socket = Posix(larder.config("node")["tenants"][0]["socket"])
    services = {one["metadata"]["name"]: one for one in documents if one["kind"] == "Service"}
    for workload in workloads(documents, "vllm"):
        name, pod = workload["metadata"]["name"], pod_of(workload)
        (container,) = pod["containers"]
        settings = transfer(pod)["kv_connector_extra_config"]
        if pod["securityContext"]["supplementalGroups"] != [node["securityContext"]["runAsGroup"]]:
            yield f"{name} has not the group of the sockets"
        if not selects(node["nodeSelector"], pod.get("nodeSelector", {}) | {"kubernetes.io/os": "linux"}):
            yield f"{name} may run where there is no node"
        folders = [one["hostPath"]["path"] for one in pod["volumes"] if one["name"] == "larder"]
        mounts = [one["mountPath"] for one in container["volumeMounts"] if one["name"] == "larder"]
        if folders != [str(socket.parent)] or [settings["socket"]] != [f"{one}/{socket.name}" for one in mounts]:
            yield f"{name} has {folders} at {mounts}, and its socket is {settings['socket']}"
        if not settings.keys() <= known:
            yield f"{name} has settings that the connector does not know: {settings.keys() - known}"
        if transfer(pod)["kv_load_failure_policy"] != "recompute":
            yield f"{name} fails requests whose blocks do not come"
        home = {one["name"]: one.get("value") for one in container["env"]}.get("HOME")
        if home not in [one["mountPath"] for one in container["volumeMounts"] if not one.get("readOnly")]:
            yield f"{name} cannot write to its home {home}: the image may have no user of its number"
        labels = workload["spec"]["template"]["metadata"]["labels"]
        if not any(selects(one["spec"]["selector"], labels) and headless(one) for one in services.values()):
            yield f"no Service has the addresses of {name}"


def routers(documents, larder):
    options = re.findall(r'add\(\s*"(--[a-z-]+)"', (PACKAGE / "router/__main__.py").read_text())
    services = {one["metadata"]["name"]: one for one in documents if one["kind"] == "Service"}
    (router,) = workloads(documents, "larder-router")
    labels = router["spec"]["template"]["metadata"]["labels"]
    (container,) = pod_of(router)["containers"]
    given = [argument.split("=", 1) for argument in container["args"]]
    for name, value in given:
        if name not in options:
            yield f"the router has no option {name}"
        if name in ("--engine", "--prefill", "--decode"):
            url = urlsplit(value)
            service = services.get(url.hostname)
            if service is None or not headless(service) or url.port != service["spec"]["ports"][0]["port"]:
                yield f"nothing is at {value}"
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    said = dict(given)
    if said["--listen"] != f"0.0.0.0:{ports['http']}" or said["--status-listen"] != f"0.0.0.0:{ports['status']}":
        yield "the router listens elsewhere than its ports are"
    patience = float(said["--leave-seconds"]) + float(said["--drain-seconds"])
    if pod_of(router)["terminationGracePeriodSeconds"] <= patience:
        yield "the router is killed before its requests have ended"
    coordinator = larder.named("Service", said["--coordinator"].split(".")[0])
    http = [port["port"] for port in coordinator["spec"]["ports"] if port["name"] == "http"] if coordinator else []
    if not said["--coordinator"].endswith(f".larder:{http[0] if http else ''}"):
        yield f"there is no coordinator at {said['--coordinator']}"
    peer = {"namespace": "vllm", "labels": labels}
    for component, port in [("node", 9440), ("coordinator", 7600)]:
        to = {"namespace": "larder", "labels": larder.workload(component)["spec"]["template"]["metadata"]["labels"]}
        if not allowed(larder, "Ingress", to, peer, "TCP", port):
            yield f"the router does not reach the {component}"


def planted(documents):
    """Pairs of a fault, and a copy of the documents with it."""

    def router(copy):
        return pod_of(workloads(copy, "larder-router")[0])["containers"][0]

    def engine(copy):
        return pod_of(workloads(copy, "vllm")[0])

    def set_argument(container, name, value):
        container["args"] = [f"{name}={value}" if one.startswith(name) else one for one in container["args"]]

    yield "an unknown option", lambda copy: router(copy)["args"].append("--retries=3")
    yield "another coordinator", lambda copy: set_argument(router(copy), "--coordinator", "larder-coordinator:7600")
    yield "a router that is killed", lambda copy: set_argument(router(copy), "--drain-seconds", "80")
    yield "a router of another name", lambda copy: rename(workloads(copy, "larder-router")[0])
    yield "engines at another port", lambda copy: services_of(copy, "vllm")[0]["spec"]["ports"][0].update(port=80)
    yield "no group of the sockets", lambda copy: engine(copy)["securityContext"].update(supplementalGroups=[1])
    yield "another tenant's folder", lambda copy: engine(copy)["volumes"][0]["hostPath"].update(path="/run/larder/red")
    yield "no home", lambda copy: engine(copy)["containers"][0].update(env=[])
    yield (
        "an unknown setting",
        lambda copy: set_argument(
            engine(copy)["containers"][0],
            "--kv-transfer-config",
            json.dumps(with_setting(transfer(engine(copy)), "chunk_size", 256)),
        ),
    )


def rename(workload):
    workload["spec"]["template"]["metadata"]["labels"] |= {"app.kubernetes.io/name": "router"}


def with_setting(config, name, value):
    return config | {"kv_connector_extra_config": config["kv_connector_extra_config"] | {name: value}}


def workloads(documents, name):
    """The Deployments of that name."""
    kinds = [one for one in documents if one["kind"] == "Deployment"]
    return [one for one in kinds if one["metadata"]["labels"]["app.kubernetes.io/name"] == name]


def services_of(documents, name):
    return [
        one for one in documents if one["kind"] == "Service" and one["spec"]["selector"]["app.kubernetes.io/name"] == name
    ]


def pod_of(workload):
    return workload["spec"]["template"]["spec"]


def transfer(pod):
    """The engine's --kv-transfer-config."""
    (text,) = [one for one in pod["containers"][0]["args"] if one.startswith("--kv-transfer-config=")]
    return json.loads(text.split("=", 1)[1])


def headless(service):
    return service["spec"].get("clusterIP") == "None"


def fields(source):
    return re.findall(r"^    (\w+): ", source, re.M)
