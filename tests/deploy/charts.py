"""Checks the Helm chart: that it renders, and that it equals the overlays."""

import json
import re
import shutil
import tomllib

import jsonschema
import yaml

import tools
from manifests import Manifests, allowed, pod_labels, problems, resources
from schemas import schema_problems
from tools import ROOT, load_all, run

CHART = ROOT / "deploy/helm/larder"
# Overlays, and the files of values with which the chart has the same content.
OVERLAYS = {
    "single": ["larder-ca", "single"],
    "no-gpu": ["larder-ca", "no-gpu"],
    "three-coordinators": ["larder-ca", "no-gpu", "three-coordinators"],
    "gpu": ["gpu"],
    "gpu-huge-pages": ["gpu", "gpu-huge-pages"],
    "gpu-disk": ["gpu", "disk"],
}
# The sections of each configuration that have an address to listen at.
LISTENING = {"node": ["http", "cluster"], "coordinator": ["http", "peer"]}


def merged(values, more):
    """Values as Helm merges them: null removes a key."""
    result = dict(values)
    for key, value in more.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


def render_chart(more, chart=CHART, release="larder", versions=("monitoring.coreos.com/v1",), existing=()):
    """The documents of the chart, in a cluster that has the `existing` documents."""
    values = yaml.safe_load((chart / "values.yaml").read_text())
    for one in more:
        values = merged(
            values, yaml.safe_load((chart / f"values-{one}.yaml").read_text()) if isinstance(one, str) else one
        )
    try:
        jsonschema.validate(values, json.loads((chart / "values.schema.json").read_text()))
    except jsonschema.ValidationError as error:
        raise AssertionError(f"values: {error.message}") from error
    given = json.dumps({"values": values, "existing": list(existing)})
    return load_all(run(tools.chart_renderer(), chart, release, *versions, input=given))


def chart_renders(chart):
    charts = {name: render_chart(more, chart) for name, more in OVERLAYS.items()}
    return charts, f"{len(charts)} rendered by Go's templates and sprig, not by Helm"


def comparable(documents):
    """Documents by kind and name, without the permanent differences between Kustomize and Helm."""

    def clean(value):
        if isinstance(value, dict):
            dropped = {
                "app.kubernetes.io/instance",
                "app.kubernetes.io/managed-by",
                "helm.sh/chart",
                "checksum/config",
                "namespace",
            }
            cleaned = {key: clean(one) for key, one in value.items() if key not in dropped}
            return {key: one for key, one in cleaned.items() if key not in ("annotations", "labels") or one}
        if isinstance(value, list):
            cleaned = [clean(one) for one in value]
            named = all(isinstance(one, dict) and "name" in one for one in cleaned)
            return sorted(cleaned, key=lambda one: one["name"]) if named else cleaned
        # Kustomize appends a hash of the content to the name.
        return (
            re.sub(r"^(larder-(?:node|coordinator))-[a-z0-9]{10}$", r"\1", value) if isinstance(value, str) else value
        )

    def parsed(name, text):
        if not name.endswith(".toml"):
            return text.strip()
        config = tomllib.loads(text)
        if "host" in config:
            config["host"]["arena_bytes"] = resources.size(config["host"]["arena_bytes"])
        return config

    result = {}
    for document in documents:
        if document["kind"] == "Namespace":
            continue
        document = clean(document)
        if document["kind"] == "ConfigMap":
            document["data"] = {name: parsed(name, text) for name, text in document["data"].items()}
        # cert-manager's custom resources have only the chart's labels.
        if document["kind"] in ("Certificate", "Issuer", "ConfigMap"):
            document["metadata"].pop("labels", None)
        result[document["kind"], document["metadata"]["name"]] = document
    return result


def chart_equals_overlays(charts, overlays):
    count = 0
    for name, chart in charts.items():
        ours, theirs = comparable(chart), comparable(overlays[name])
        assert set(ours) == set(theirs), f"{name}: {set(ours) ^ set(theirs)}"
        for key in ours:
            assert ours[key] == theirs[key], (
                f"{name}: {key}\nchart   {json.dumps(ours[key], sort_keys=True)}\n"
                f"overlay {json.dumps(theirs[key], sort_keys=True)}"
            )
            count += 1
    return True, f"{count} documents are the same"


def other_charts_are_found(folder, overlays):
    """Checks that a chart that has drifted from the overlays is found."""
    drifts = {
        "templates/node.yaml": ("path: /run/larder", "path: /run/larders"),
        "templates/network.yaml": ("port: 9441", "port: 9442"),
        "templates/coordinator.yaml": ("maxUnavailable: 1", "maxUnavailable: 0"),
        "templates/_helpers.tpl": ("add 512", "add 511"),
        "templates/monitoring.yaml": ("interval: 15s", "interval: 30s"),
        "templates/certificates.yaml": ("duration: 8760h", "duration: 24h"),
        "values-disk.yaml": ("1TiB", "2TiB"),
        "values-three-coordinators.yaml": ("replicas: 3", "replicas: 2"),
        "values-gpu.yaml": ("arenaMiB: 65536", "arenaMiB: 65537"),
    }
    for i, (file, (old, new)) in enumerate(drifts.items()):
        chart = folder / f"chart-{i}"
        shutil.copytree(CHART, chart)
        text = (chart / file).read_text()
        assert old in text, f"{file} has no {old}"
        (chart / file).write_text(text.replace(old, new))
        try:
            chart_equals_overlays(chart_renders(chart)[0], overlays)
        except AssertionError:
            continue
        raise AssertionError(f"not found: {new} in {file}")
    return True, f"{len(drifts)} planted, all found"


def one_value_is_enough():
    """Checks `--set size=65Gi`: the arena, the memory limit that goes with it, and monitoring only if its operator is there."""
    documents = render_chart([{"size": "65Gi"}], versions=())
    found = schema_problems(documents) + problems(documents)
    assert not found, found
    assert Manifests(documents).config("node")["host"]["arena_bytes"] == "66560MiB"
    # No host label and no Secret is needed beforehand.
    pod = Manifests(documents).workload("node")["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"kubernetes.io/os": "linux"}, pod["nodeSelector"]
    (authority,) = Manifests(documents).of("Secret")
    named = {volume["secret"]["secretName"] for one in ["node", "coordinator"] for volume in volumes(documents, one) if "secret" in volume}
    assert named == {authority["metadata"]["name"]}, named
    # An upgrade leaves the authority alone, and so does a rollback, as no hook runs then. Another cluster has a different one.
    annotations = authority["metadata"]["annotations"]
    assert annotations["helm.sh/hook"] == "pre-install,pre-upgrade", annotations
    assert annotations["helm.sh/hook-delete-policy"] == "hook-failed", "by default, Helm deletes the Secret that exists first"
    assert not Manifests(render_chart([{"size": "65Gi"}], existing=[authority])).of("Secret")
    (other,) = Manifests(render_chart([{"size": "65Gi"}])).of("Secret")
    assert other["data"]["ca.key"] != authority["data"]["ca.key"]
    assert not Manifests(documents).of("ServiceMonitor") and not Manifests(documents).of("PrometheusRule")
    assert Manifests(render_chart([{"size": "65Gi"}])).of("ServiceMonitor")
    for size, mebibytes in [("512Mi", 512), ("2Ti", 2 << 20)]:
        config = Manifests(render_chart([{"size": size}])).config("node")
        assert config["host"]["arena_bytes"] == f"{mebibytes}MiB", config


def volumes(documents, component):
    return Manifests(documents).workload(component)["spec"]["template"]["spec"]["volumes"]


def nodes_reach_gpus():
    """Checks that the chart's device lane is that of the component, and that without it no GPU memory is taken."""
    component = yaml.safe_load((ROOT / "deploy/kubernetes/components/device-lane/node.yaml").read_text())["spec"]["template"]["spec"]
    documents = render_chart(["gpu", {"node": {"deviceLane": True, "gpu": {"device_bytes": "8GiB"}}}])
    found = schema_problems(documents) + problems(documents)
    assert not found, found
    pod = Manifests(documents).workload("node")["spec"]["template"]["spec"]
    (container,), (of_component,) = pod["containers"], component.pop("containers")
    assert component == {key: pod[key] for key in component}, pod
    assert all(one in container["env"] for one in of_component["env"]), container["env"]
    assert Manifests(documents).config("node")["gpu"] == {"device_bytes": "8GiB"}


def pods_are_as_said():
    """Checks the settings of pods that platforms ask for."""
    common = {
        "priorityClassName": "system-node-critical",
        "podAnnotations": {"mesh/inject": "false"},
        "podLabels": {"team": "inference"},
        "serviceAccountAnnotations": {"cloud/role": "reader"},
        "seLinuxOptions": {"type": "spc_t"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
    }
    coordinator = common | {"nodeSelector": {"pool": "infra"}}
    values = {
        "image": {"pullPolicy": "Always"},
        "node": common | {"hostNetwork": True},
        "coordinator": coordinator,
        "router": {"namespace": "gateways"},
    }
    documents = render_chart([values])
    wrong = schema_problems(documents)
    assert not wrong, wrong
    all_ = Manifests(documents)
    for component in ["node", "coordinator"]:
        template = all_.workload(component)["spec"]["template"]
        pod = template["spec"]
        assert pod["priorityClassName"] == "system-node-critical" and pod["tolerations"] == common["tolerations"], pod
        assert template["metadata"]["annotations"]["mesh/inject"] == "false"
        assert template["metadata"]["labels"]["team"] == "inference"
        assert pod["securityContext"]["seLinuxOptions"] == {"type": "spc_t"}
        account = all_.named("ServiceAccount", pod["serviceAccountName"])
        assert account["metadata"]["annotations"] == {"cloud/role": "reader"}
        policies = [one["imagePullPolicy"] for one in pod.get("initContainers", []) + pod["containers"]]
        assert set(policies) == {"Always"}, policies
    assert all_.workload("coordinator")["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "infra"}
    node = all_.workload("node")["spec"]["template"]["spec"]
    assert (node["hostNetwork"], node["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    # A pod that hears a host may see the address of a tunnel.
    (configure,) = [one for one in node["initContainers"] if one["name"] == "configure"]
    fields = {one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"] for one in configure["env"] if "valueFrom" in one}
    assert fields.get("LARDER_HOST_IP") == "status.hostIP", fields
    assert all_.config("node")["cluster"].get("advertise") == "@HOST_IP@:9441", all_.config("node")["cluster"]
    # A host is no pod, so no selector matches it.
    host, one = {"namespace": None, "labels": {}}, {"namespace": "larder", "labels": pod_labels(all_, "coordinator")}
    assert allowed(all_, "Ingress", one, host, "UDP", 7601), "no node can join from its host's address"
    assert allowed(all_, "Egress", one, host, "UDP", 9441) and allowed(all_, "Egress", one, host, "TCP", 9440)
    assert not allowed(all_, "Ingress", one, host, "TCP", 7600), "HTTP has no authentication"
    routers = [space for space in json.dumps(all_.of("NetworkPolicy")).split('"kubernetes.io/metadata.name": ')[1:] if "gateways" in space]
    assert len(routers) == 2, "nodes and coordinator let them in"


def addresses_are_of_both_kinds():
    """Checks that pods with IPv6 addresses can be reached at all their ports."""
    all_ = Manifests(render_chart([{"size": "4Gi", "listenAddress": "[::]"}]))
    found = [all_.config(name)[section]["listen"] for name, sections in LISTENING.items() for section in sections]
    assert found == ["[::]:9440", "[::]:9441", "[::]:7600", "[::]:7601"], found


def windows_have_memory():
    """Checks that the memory limit has room for the write windows that tenants are given, as the overlays' has."""
    for windows in [["1GiB"], ["64MiB", "64MiB"], ["2 GiB", 3 << 30, "200MB"], ["2Gi", "200M"], ["4GiB", None], [None]]:
        tenants = [{"name": f"t{i}"} | ({"max_window_bytes": one} if one else {}) for i, one in enumerate(windows)]
        manifests = Manifests(render_chart([{"size": "4Gi", "node": {"tenants": tenants}}]))
        (container,) = manifests.workload("node")["spec"]["template"]["spec"]["containers"]
        expected = resources.resources(manifests.config("node"), 1)["limits"]["memory"]
        assert container["resources"]["limits"]["memory"] == expected, (windows, container["resources"], expected)


def disks_have_memory():
    """Checks that the memory limit grows with the disk tier, whose chunks are in the index too, as the overlays' does."""
    limits = []
    for disk in [{}, {"capacity_bytes": "1TiB"}, {"capacity_bytes": 7 << 40}, {"capacity_bytes": "500GB"}]:
        manifests = Manifests(render_chart([{"size": "64Gi", "node": {"disk": disk}}]))
        (container,) = manifests.workload("node")["spec"]["template"]["spec"]["containers"]
        limit = container["resources"]["limits"]["memory"]
        assert limit == resources.resources(manifests.config("node"), 1)["limits"]["memory"], (disk, limit)
        limits.append(int(limit.removesuffix("Mi")))
    # As much again is for write windows.
    assert limits[1] - limits[0] == 2 * 512 and limits[2] - limits[0] == 2 * 7 * 512, limits
    more = Manifests(render_chart([{"size": "64Gi", "node": {"extraMiB": 100}}])).workload("node")["spec"]["template"]["spec"]
    assert more["containers"][0]["resources"]["limits"]["memory"] == f"{limits[0] + 200}Mi", more


def identities_are_reached():
    """Checks that nodes reach the cloud's credentials if the object store needs their account."""
    store = {"object": {"url": "s3://chunks"}, "objectPort": 9000}
    account = {"serviceAccountAnnotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/larder"}}
    for more, is_let in [({}, False), (account, True)]:
        policies = json.dumps(Manifests(render_chart([{"node": store | more}])).of("NetworkPolicy"))
        assert all((one in policies) == is_let for one in ["169.254.169.252/32", "169.254.169.254/32", "169.254.170.23/32"]), policies
        assert ('"port": 443,' in policies) == is_let, policies


def values_are_checked():
    wrong = [
        {"nodes": {}},
        {"size": "65"},
        {"size": "65G"},
        {"size": "0Gi"},
        {"listenAddress": "::"},
        {"image": {"pullPolicy": "Sometimes"}},
        {"monitoring": {"enabled": "yes"}},
        {"node": {"hostNetwork": "true"}},
        {"node": {"podAnnotations": {"one": 1}}},
        {"node": {"arenaMB": 1}},
        {"node": {"extraMiB": -1}},
        {"node": {"arenaMiB": "8Gi"}},
        {"certificates": {"source": "none"}},
        {"coordinator": {"replicas": 0}},
        {"coordinator": {"replicas": 6}},
        {"coordinator": {"replicas": 3, "election": {"backend": "etcd"}}},
        {"node": {"tenants": [{"name": "../red"}]}},
        {"node": {"host": {"arena_bytes": 1}}},
        {"node": {"gpu": {"device_bytes": "8GiB"}}},
        {"node": {"disk": {"write": "write_back"}}},
        {"node": {"disk": {"capacity_bytes": "1TiB", "folder": "/var/lib/other"}}},
        {"tracing": {"endpoint": "collector:4317"}},
        {"tracing": {"sampleRatio": 2}},
        {"monitoring": {"runbooks": "docs.example/runbooks/"}},
    ]
    for values in wrong:
        try:
            render_chart([values])
        except AssertionError:
            continue
        raise AssertionError(f"accepted: {values}")
    documents = render_chart(
        [
            {
                "image": {"repository": "registry.example/larder", "tag": "9"},
                "imagePullSecrets": [{"name": "registry"}],
                "tracing": {"endpoint": "http://collector.traces:4318", "sampleRatio": 0.25, "namespace": "traces"},
                "monitoring": {"labels": {"release": "prometheus"}, "runbooks": "https://docs.example/runbooks"},
                "coordinator": {"storageClassName": "fast", "membership": {"grace_ms": 5000}},
                "node": {
                    "arenaMiB": 1048577,
                    "hugePages": True,
                    "hostPID": True,
                    "tenants": [{"name": "red", "max_bytes": "1GiB"}, {"name": "blue", "max_window_bytes": "64MiB"}],
                    "host": {"policy": "lru", "low_watermark": 0.5, "capacity_chunks": 100000000},
                    "session": {"max_sessions": 5},
                    "disk": {"capacity_bytes": "2TiB", "write_after_uses": 3},
                    "diskHostPath": "/mnt/nvme",
                    "cluster": {"share": False},
                },
            }
        ]
    )
    found = schema_problems(documents) + problems(documents)
    assert not found, found
    found = [line for more in OVERLAYS.values() for line in problems(render_chart(more, release="kv"))]
    assert not found, found
    assert all(
        one["metadata"]["labels"]["release"] == "prometheus" for one in Manifests(documents).of("ServiceMonitor")
    )
    monitoring = json.dumps([Manifests(documents).of("PrometheusRule"), Manifests(documents).of("ConfigMap")])
    assert "https://docs.example/runbooks/larder-member-lost.html" in monitoring
    assert "larder.example/runbooks" not in monitoring, "an alert or a dashboard links to somewhere else"
    node, coordinator = Manifests(documents).config("node"), Manifests(documents).config("coordinator")
    assert node["host"] == {
        "arena_bytes": "1048577MiB",
        "huge_pages": "auto",
        "policy": "lru",
        "low_watermark": 0.5,
        "capacity_chunks": 100000000,
    }, node
    assert [tenant["name"] for tenant in node["tenants"]] == ["red", "blue"] and node["tenants"][0][
        "max_bytes"
    ] == "1GiB"
    assert node["tenants"][1]["max_window_bytes"] == "64MiB", node
    windows_have_memory()
    disks_have_memory()
    assert node["disk"] == {"folder": "/var/lib/larder/disk", "capacity_bytes": "2TiB", "write_after_uses": 3}, node
    assert "/mnt/nvme" in [
        volume["hostPath"]["path"]
        for volume in Manifests(documents).workload("node")["spec"]["template"]["spec"]["volumes"]
        if "hostPath" in volume
    ]
    assert node["session"] == {"max_sessions": 5} and node["cluster"]["share"] is False, node
    tracing = {"endpoint": "http://collector.traces:4318", "sample_ratio": 0.25}
    assert node["tracing"] == coordinator["tracing"] == tracing, (node, coordinator)
    ways_out = [one["spec"]["egress"] for one in Manifests(documents).of("NetworkPolicy") if "egress" in one["spec"]]
    for rules in ways_out:
        to_collector = [rule for rule in rules if {"port": 4318, "protocol": "TCP"} in rule["ports"]]
        assert len(to_collector) == 1 and "traces" in json.dumps(to_collector), rules
    assert len(ways_out) == 2, "nodes and coordinator"
    assert coordinator["membership"] == {"grace_ms": 5000}, coordinator
    documents = render_chart([{"coordinator": {"replicas": 2, "election": {"lease_ms": 15000}, "apiServerPorts": [443, 6443]}}])
    found = schema_problems(documents) + problems(documents)
    assert not found, found
    elected = Manifests(documents).config("coordinator")["election"]
    assert elected == {"backend": "kubernetes", "name": "larder-leader", "lease_ms": 15000}, elected
    one_value_is_enough()
    addresses_are_of_both_kinds()
    pods_are_as_said()
    nodes_reach_gpus()
    identities_are_reached()
    # The store may be anywhere, so the nodes' egress is open at its port: only schemas are checked.
    store = {"url": "s3://chunks", "settings": {"region": "eu-central-1", "virtual_hosted_style_request": "true"}}
    documents = render_chart([{"node": {"object": store, "objectPort": 9000}}])
    assert not schema_problems(documents)
    assert Manifests(documents).config("node")["object"] == store
    return True, f"{len(wrong)} wrong ones refused, all others reach the configuration"
