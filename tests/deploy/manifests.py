"""Checks the manifests against each other and against the configurations in them."""

import copy
import re
import sys
import tomllib
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import PurePosixPath as Posix

from tools import ROOT


def load(path):
    """Loads a Python script as a module, without writing anything beside it."""
    sys.dont_write_bytecode = True
    loader = SourceFileLoader(path.name, str(path))
    module = module_from_spec(spec_from_loader(path.name, loader))
    loader.exec_module(module)
    return module


resources = load(ROOT / "deploy/kubernetes/resources")

# The Secrets that deploy/kubernetes/certificates makes.
ISSUED_SECRETS = set(re.findall(r"^apply (\S+)", (ROOT / "deploy/kubernetes/certificates").read_text(), re.M))
# The verbs with which the program uses a Lease that somebody else made.
REGISTER = (ROOT / "coordinator/src/register/kubernetes.rs").read_text()
VERBS = [re.search(rf'^const {verb}: &str = "(\w+)";', REGISTER, re.M)[1] for verb in ["GET", "PATCH"]]
SCRAPER = {"namespace": "monitoring", "labels": {"app": "prometheus"}}
STRANGER = {"namespace": "larder", "labels": {"app": "stranger"}}
ROUTER = {"namespace": "vllm", "labels": {"app.kubernetes.io/name": "larder-router"}}
# Only one of a router's two labels.
OTHERS_OF_ROUTERS = {"namespace": "vllm", "labels": {"app.kubernetes.io/name": "vllm"}}
ELSEWHERE = {"namespace": "default", "labels": ROUTER["labels"]}


class Manifests:
    """The documents of one cluster."""

    def __init__(self, documents):
        self.documents = [document for document in documents if document]

    def of(self, kind):
        return [document for document in self.documents if document["kind"] == kind]

    def names(self, kind):
        return {document["metadata"]["name"] for document in self.of(kind)}

    def named(self, kind, name):
        return next((one for one in self.of(kind) if one["metadata"]["name"] == name), None)

    def workload(self, component):
        kind = {"node": "DaemonSet", "coordinator": "StatefulSet"}[component]
        (found,) = self.of(kind)
        return found

    def config(self, component):
        """A component's configuration, as its ConfigMap has it."""
        (text,) = [
            data[f"{component}.toml"]
            for data in (one["data"] for one in self.of("ConfigMap"))
            if f"{component}.toml" in data
        ]
        return tomllib.loads(text)


def problems(documents):
    """All problems, one line each."""
    all_ = Manifests(copy.deepcopy(documents))
    found = []
    for check in [pods, commands, services, monitors, disruption, certificates, configurations, memory, election, network]:
        found += [f"{check.__name__}: {line}" for line in check(all_)]
    return found


def commands(all_):
    """Checks that commands in the pods find the coordinator."""
    for component, address in [("node", None), ("coordinator", "127.0.0.1")]:
        (main,) = all_.workload(component)["spec"]["template"]["spec"]["containers"]
        said = next((one["value"] for one in main.get("env", []) if one["name"] == "LARDER_COORDINATOR"), "")
        host, _, port = said.partition(":")
        wanted = address or all_.config("node")["cluster"]["coordinator"].partition(":")[0]
        if (host, port) != (wanted, str(number(all_.config("coordinator")["http"]["listen"]))):
            yield f"commands in the {component}'s pod ask {said!r}"


def pods(all_):
    accounts, maps = all_.names("ServiceAccount"), all_.names("ConfigMap")
    made = {one["spec"]["secretName"] for one in all_.of("Certificate")}
    secrets = made | all_.names("Secret") or ISSUED_SECRETS
    for component in ["node", "coordinator"]:
        workload = all_.workload(component)
        template, name = workload["spec"]["template"], workload["metadata"]["name"]
        pod = template["spec"]
        if not selects(workload["spec"]["selector"]["matchLabels"], template["metadata"]["labels"]):
            yield f"{name} does not select its own pods"
        if pod["serviceAccountName"] not in accounts:
            yield f"there is no ServiceAccount {pod['serviceAccountName']}"
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        claims = {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
        for volume in volumes.values():
            if "configMap" in volume and volume["configMap"]["name"] not in maps:
                yield f"there is no ConfigMap {volume['configMap']['name']}"
            if "secret" in volume and volume["secret"]["secretName"] not in secrets:
                yield f"nobody makes the Secret {volume['secret']['secretName']}"
            if len(volume) != 2:
                yield f"the volume {volume['name']} has not one source"
        containers = pod.get("initContainers", []) + pod["containers"]
        mounted = {mount["name"] for one in containers for mount in one["volumeMounts"]}
        for wrong in mounted ^ (set(volumes) | claims):
            yield f"the volume {wrong} of {name} is mounted without being there, or the reverse"
        for one in containers:
            yield from hardened(pod, one)
        (main,) = pod["containers"]
        ports = {port["name"] for port in main["ports"]}
        for probe, path in [("readinessProbe", "/readyz"), ("livenessProbe", "/healthz")]:
            request = main[probe]["httpGet"]
            if request["path"] != path or request["port"] not in ports:
                yield f"the {probe} of {name} asks {request}"


def hardened(pod, container):
    security, name = container["securityContext"], container["name"]
    user = security.get("runAsUser", pod["securityContext"].get("runAsUser"))
    if name != "folder" and (not user or not (security | pod["securityContext"]).get("runAsNonRoot")):
        yield f"the container {name} may be root"
    if security["capabilities"]["drop"] != ["ALL"] or security["allowPrivilegeEscalation"] is not False:
        yield f"the container {name} has privileges"
    if (
        security["readOnlyRootFilesystem"] is not True
        or pod["securityContext"]["seccompProfile"]["type"] != "RuntimeDefault"
    ):
        yield f"the container {name} is not confined"


def services(all_):
    for service in all_.of("Service"):
        name, spec = service["metadata"]["name"], service["spec"]
        chosen = [
            all_.workload(one)
            for one in ["node", "coordinator"]
            if selects(spec["selector"], all_.workload(one)["spec"]["template"]["metadata"]["labels"])
        ]
        if len(chosen) != 1:
            yield f"{name} selects {len(chosen)} workloads"
            continue
        ports = {port["name"]: port for port in chosen[0]["spec"]["template"]["spec"]["containers"][0]["ports"]}
        for port in spec["ports"]:
            to = ports.get(port["targetPort"])
            if to is None or to["containerPort"] != port["port"] or protocol(to) != protocol(port):
                yield f"the port {port['name']} of {name} leads nowhere"
    stateful = all_.workload("coordinator")["spec"]["serviceName"]
    if stateful not in all_.names("Service"):
        yield f"there is no Service {stateful}"


def monitors(all_):
    for monitor in all_.of("ServiceMonitor"):
        name, spec = monitor["metadata"]["name"], monitor["spec"]
        chosen = [
            one for one in all_.of("Service") if selects(spec["selector"]["matchLabels"], one["metadata"]["labels"])
        ]
        if len(chosen) != 1:
            yield f"{name} selects {len(chosen)} services"
            continue
        ports = {port["name"] for port in chosen[0]["spec"]["ports"]}
        for endpoint in spec["endpoints"]:
            if endpoint["port"] not in ports or endpoint["path"] != "/metrics":
                yield f"{name} scrapes {endpoint}"


def disruption(all_):
    pod = all_.workload("node")["spec"]["template"]["spec"]
    drain_ms = all_.config("node")["cluster"].get("drain_ms", 0)
    # A node stops within a few seconds after its drain.
    if pod.get("terminationGracePeriodSeconds", 30) * 1000 < drain_ms + 10_000:
        yield f"a node has no time to drain for {drain_ms} ms before it is killed"
    for budget in all_.of("PodDisruptionBudget"):
        wanted = budget["spec"]["selector"]["matchLabels"]
        if not any(selects(wanted, pod_labels(all_, one)) for one in ["node", "coordinator"]):
            yield f"{budget['metadata']['name']} selects nothing"


def certificates(all_):
    """Checks the names by the rules of client/protocol/src/identity.rs."""
    volumes = {volume["name"]: volume for volume in all_.workload("node")["spec"]["template"]["spec"]["volumes"]}
    attributes = volumes["tls"].get("csi", {}).get("volumeAttributes", {})
    if not all_.of("Certificate"):
        if attributes:
            yield "the nodes' certificates come from cert-manager, the coordinator's do not"
        return
    issuers = all_.names("Issuer")
    secrets = {one["spec"]["secretName"] for one in all_.of("Certificate")}
    for issuer in all_.of("Issuer"):
        if "ca" in issuer["spec"] and issuer["spec"]["ca"]["secretName"] not in secrets:
            yield f"there is no certificate for the issuer {issuer['metadata']['name']}"
    for certificate in all_.of("Certificate"):
        spec = certificate["spec"]
        if spec["issuerRef"]["name"] not in issuers:
            yield f"there is no issuer {spec['issuerRef']['name']}"
        if spec.get("isCA"):
            continue
        if spec["uris"] != ["larder://coordinator/main"] or spec["dnsNames"] != ["coordinator.larder"]:
            yield f"the coordinator is {spec['uris']} {spec['dnsNames']}"
        if not {"server auth", "client auth"} <= set(spec["usages"]):
            yield "the coordinator's certificate is not for both ends"
    prefix = "csi.cert-manager.io/"
    if attributes.get(prefix + "issuer-name") not in issuers:
        yield f"there is no issuer {attributes.get(prefix + 'issuer-name')} for the nodes"
    names = attributes.get(prefix + "uri-sans"), attributes.get(prefix + "dns-names")
    if names != ("larder://node/${POD_NAME}", "node.larder"):
        yield f"a node is {names}"
    if not {"server auth", "client auth"} <= set(attributes.get(prefix + "key-usages", "").split(",")):
        yield "the nodes' certificates are not for both ends"
    if name_field(all_) != "metadata.name":
        yield "the nodes are not called as their certificates are"


def configurations(all_):
    """Checks that the configurations name ports and paths that the pods have."""
    node, coordinator = all_.config("node"), all_.config("coordinator")
    host, _, port = node["cluster"]["coordinator"].partition(":")
    service = all_.named("Service", host)
    if service is None or {"port": int(port), "protocol": "UDP"} not in [
        {"port": one["port"], "protocol": protocol(one)} for one in service["spec"]["ports"]
    ]:
        yield f"the nodes ask {host}:{port} for the coordinator"
    if service is not None and service["spec"].get("publishNotReadyAddresses") is not True:
        yield "a coordinator that waits for its nodes is not found by them"
    for component, config, keys in [("node", node, node["cluster"]), ("coordinator", coordinator, coordinator["peer"])]:
        container = all_.workload(component)["spec"]["template"]["spec"]["containers"][0]
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        ports = {one["name"]: (one["containerPort"], protocol(one)) for one in container["ports"]}
        listens = {"http": (config["http"]["listen"], "TCP"), "peer": (keys["listen"], "UDP")}
        for name, (listen, kind) in listens.items():
            address, _, number = listen.rpartition(":")
            if address != "0.0.0.0" or ports.get(name) != (int(number), kind):
                yield f"the {component} listens on {listen}, its pod has {ports.get(name)}"
        paths = [
            keys["ca"],
            keys["certificate"],
            keys["key"],
            container["args"][container["args"].index("--config") + 1],
        ]
        paths += [tenant["socket"] for tenant in config.get("tenants", [])]
        paths += [config["state"]["path"]] if "state" in config else []
        paths += [config["disk"]["folder"]] if "disk" in config else []
        for path in paths:
            if not any(within(path, mount) for mount in mounts):
                yield f"{path} of the {component} is in no volume"
    if len({Posix(tenant["socket"]).parent for tenant in node["tenants"]}) != len(node["tenants"]):
        yield "two tenants share a folder"
    if node["name"] != "@NAME@" or name_field(all_) not in ["spec.nodeName", "metadata.name"]:
        yield "nothing names the node"


def memory(all_):
    container = all_.workload("node")["spec"]["template"]["spec"]["containers"][0]
    has = container["resources"]
    wanted = resources.resources(all_.config("node"), has["requests"]["cpu"])
    if has != wanted:
        yield f"the node has {has}, its configuration needs {wanted}"


def election(all_):
    """Checks that several coordinators elect a leader through one Lease, with exactly the rights that the program needs."""
    stateful, config = all_.workload("coordinator"), all_.config("coordinator").get("election", {})
    replicas, pod = stateful["spec"]["replicas"], stateful["spec"]["template"]["spec"]
    if (config.get("backend") == "kubernetes") != (replicas > 1):
        yield f"{replicas} coordinators, and the election backend {config.get('backend')}"
    several = replicas > 1
    if pod["automountServiceAccountToken"] is not several:
        yield f"{replicas} coordinators, and automountServiceAccountToken {pod['automountServiceAccountToken']}"
    rules = [rule for role in all_.of("Role") for rule in role["rules"]]
    wanted = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "resourceNames": [config.get("name")]}
    if rules != ([wanted | {"verbs": VERBS}] if several else []) or all_.of("ClusterRole"):
        yield f"rights to {rules}, where {replicas} coordinators elect a leader through {config.get('name')}"
    if not several:
        return
    if all_.names("Lease") != {config.get("name")}:
        yield f"there is no Lease {config.get('name')}, and nobody may make it"
    bound = [(one["roleRef"]["name"], one["subjects"]) for one in all_.of("RoleBinding")]
    account = {"kind": "ServiceAccount", "name": pod["serviceAccountName"], "namespace": "larder"}
    if bound != [(role, [account]) for role in all_.names("Role")]:
        yield f"the coordinators are not bound to their role: {bound}"
    (container,) = pod["containers"]
    fields = {one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"] for one in container["env"] if "valueFrom" in one}
    if container["args"][-2:] != ["--advertise", "$(POD_IP)"] or fields.get("POD_IP") != "status.podIP":
        yield "the coordinators do not say where they are"
    apart = pod.get("affinity", {}).get("podAntiAffinity", {}).get("preferredDuringSchedulingIgnoredDuringExecution", [])
    terms = [one["podAffinityTerm"] for one in apart]
    if not any(
        one["topologyKey"] == "kubernetes.io/hostname"
        and selects(one["labelSelector"]["matchLabels"], pod_labels(all_, "coordinator"))
        for one in terms
    ):
        yield "the coordinators may all be on one host"


def network(all_):
    """Checks who reaches whom: exactly what the processes need."""
    several = all_.workload("coordinator")["spec"]["replicas"] > 1
    node, coordinator = all_.config("node"), all_.config("coordinator")
    port = {
        ("node", "peer"): number(node["cluster"]["listen"]),
        ("node", "http"): number(node["http"]["listen"]),
        ("coordinator", "peer"): number(coordinator["peer"]["listen"]),
        ("coordinator", "http"): number(coordinator["http"]["listen"]),
    }
    inside = {one: {"namespace": "larder", "labels": pod_labels(all_, one)} for one in ["node", "coordinator"]}
    scraped = bool(all_.of("ServiceMonitor"))
    sources = inside | {"scraper": SCRAPER, "stranger": STRANGER, "router": ROUTER}
    sources |= {"engine": OTHERS_OF_ROUTERS, "router elsewhere": ELSEWHERE}
    for to in inside:
        for source, peer in sources.items():
            for name, kind in [("peer", "UDP"), ("http", "TCP")]:
                # Commands in their pods ask over HTTP (`kubectl exec ... -- larder top`).
                wanted = source in inside or name == "http" and (source == "router" or scraped and source == "scraper")
                if source == to == "coordinator":
                    wanted = several
                is_open = allowed(all_, "Ingress", inside[to], peer, kind, port[to, name])
                is_open &= source not in inside or allowed(all_, "Egress", peer, inside[to], kind, port[to, name])
                if is_open != wanted:
                    yield f"{source} to {to}, {kind} {port[to, name]}: {'open' if is_open else 'closed'}"
    for source in inside:
        reaches = {port for port in [80, 443, 6443] if allowed(all_, "Egress", inside[source], STRANGER, "TCP", port)}
        # The API server may be anywhere.
        if reaches != ({443, 6443} if several and source == "coordinator" else set()):
            yield f"{source} reaches anybody at {reaches}"
    for name_port in [53, 5353]:
        if not allowed(all_, "Egress", inside["node"], {"namespace": "kube-system", "labels": {}}, "UDP", name_port):
            yield f"the node cannot look up names at port {name_port}"


def allowed(all_, direction, subject, peer, kind, port):
    """Whether the policies for `subject` let it talk with `peer`, as the peer of its `direction`."""
    policies = [
        one["spec"]
        for one in all_.of("NetworkPolicy")
        if direction in one["spec"]["policyTypes"]
        and selects(one["spec"]["podSelector"].get("matchLabels", {}), subject["labels"])
    ]
    side = {"Ingress": "from", "Egress": "to"}[direction]
    rules = [rule for policy in policies for rule in policy.get(direction.lower(), [])]
    return not policies or any(
        ("ports" not in rule or any(one["port"] == port and protocol(one) == kind for one in rule["ports"]))
        and (side not in rule or any(is_peer(one, peer) for one in rule[side]))
        for rule in rules
    )


def is_peer(selector, peer):
    spaces = selector.get("namespaceSelector")
    space = {"kubernetes.io/metadata.name": peer["namespace"]}
    in_space = peer["namespace"] == "larder" if spaces is None else selects(spaces.get("matchLabels", {}), space)
    return in_space and selects(selector.get("podSelector", {}).get("matchLabels", {}), peer["labels"])


def name_field(all_):
    containers = all_.workload("node")["spec"]["template"]["spec"]["initContainers"]
    (configure,) = [one for one in containers if one["name"] == "configure"]
    values = [one["valueFrom"]["fieldRef"]["fieldPath"] for one in configure["env"] if one["name"] == "LARDER_NAME"]
    return values[0] if values else None


def pod_labels(all_, component):
    return all_.workload(component)["spec"]["template"]["metadata"]["labels"]


def selects(selector, labels):
    return all(labels.get(key) == value for key, value in selector.items())


def within(path, folder):
    return Posix(folder) in Posix(path).parents


def protocol(port):
    return port.get("protocol", "TCP")


def number(listen):
    return int(listen.rpartition(":")[2])
