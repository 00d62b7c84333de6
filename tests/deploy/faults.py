"""Faults to plant into good manifests, one at a time: each must be found."""


def planted(documents):
    """Pairs of a fault, and a change that plants it."""

    def of(kind, part=""):
        return next(one for one in documents if one["kind"] == kind and part in one["metadata"]["name"])

    node, coordinator = of("DaemonSet"), of("StatefulSet")
    pod = node["spec"]["template"]["spec"]
    main = pod["containers"][0]
    configs = {name: one["data"] for one in documents if one["kind"] == "ConfigMap" for name in one["data"]}

    def change(config, old, new):
        assert old in configs[config][config], old
        configs[config][config] = configs[config][config].replace(old, new)

    yield "a field that does not exist", lambda: node["spec"].update(replicas=3)
    yield "a misspelt field", lambda: main.update(readinesProbe=main.pop("readinessProbe"))
    yield "a port that is a word", lambda: main["ports"][0].update(containerPort="many")
    yield "a probe of the wrong path", lambda: main["readinessProbe"]["httpGet"].update(path="/healthz")
    yield "a probe of an unknown port", lambda: main["livenessProbe"]["httpGet"].update(port="web")
    yield "a ConfigMap that is not there", lambda: volume(pod, "template")["configMap"].update(name="larder-nodes")
    yield "an account that is not there", lambda: pod.update(serviceAccountName="larder")
    yield "a volume that is not there", lambda: pod["volumes"].remove(volume(pod, "sockets"))
    yield (
        "labels that nobody selects",
        lambda: node["spec"]["template"]["metadata"]["labels"].update({"app.kubernetes.io/component": "nodes"}),
    )
    yield "a service of nobody", lambda: of("Service", "node")["spec"]["selector"].update(other="label")
    yield "a service of another port", lambda: of("Service", "coordinator")["spec"]["ports"][1].update(port=7602)
    yield (
        "a coordinator that is not found before it is ready",
        lambda: of("Service", "coordinator")["spec"].pop("publishNotReadyAddresses"),
    )
    yield "too little memory", lambda: main["resources"]["limits"].update(memory="512Mi")
    yield "an arena that has grown", lambda: change("node.toml", 'arena_bytes = "', 'arena_bytes = "1')
    yield "a container that may be root", lambda: main["securityContext"].update(runAsUser=0)
    yield "a privileged container", lambda: main["securityContext"].update(allowPrivilegeEscalation=True)
    yield "a node that listens elsewhere", lambda: change("node.toml", "0.0.0.0:9441", "0.0.0.0:9442")
    yield "a coordinator on loopback", lambda: change("coordinator.toml", "0.0.0.0:7600", "127.0.0.1:7600")
    yield "another coordinator", lambda: change("node.toml", "larder-coordinator:", "coordinator:")
    yield "a socket outside of the folder", lambda: change("node.toml", "/run/larder/", "/run/")
    yield "a state on the read-only root", lambda: change("coordinator.toml", "/var/lib/larder", "/var/lib")
    if "[disk]" in configs["node.toml"]["node.toml"]:
        yield "a disk tier on the read-only root", lambda: change("node.toml", "/var/lib/larder/disk", "/var/lib/disk")
    yield (
        "a policy for another port",
        lambda: of("NetworkPolicy", "node")["spec"]["ingress"][0]["ports"][0].update(port=9442),
    )
    yield "a policy that lets anybody in", lambda: of("NetworkPolicy", "coordinator")["spec"]["ingress"].append({})
    yield "a policy that lets data out", lambda: of("NetworkPolicy", "node")["spec"]["egress"].append({})
    yield (
        "a budget for nobody",
        lambda: of("PodDisruptionBudget")["spec"]["selector"]["matchLabels"].update(other="label"),
    )
    yield (
        "a claim without a size",
        lambda: coordinator["spec"]["volumeClaimTemplates"][0]["spec"].update(resources={"requests": "1Gi"}),
    )
    peers = of("NetworkPolicy", "coordinator")["spec"]
    if any(one["kind"] == "Lease" for one in documents):
        candidate, role = coordinator["spec"]["template"]["spec"], of("Role")["rules"][0]
        terms = "preferredDuringSchedulingIgnoredDuringExecution"
        yield "a right to every Lease", lambda: role.pop("resourceNames")
        yield "a right too many", lambda: role["verbs"].append("delete")
        yield "a right too few", lambda: role["verbs"].remove("patch")
        yield "a Lease of another name", lambda: of("Lease")["metadata"].update(name="larder")
        yield "an election by another name", lambda: change("coordinator.toml", 'name = "', 'name = "my-')
        yield "another's rights", lambda: of("RoleBinding")["subjects"][0].update(name="larder-node")
        yield "coordinators that elect nobody", lambda: change("coordinator.toml", '"kubernetes"', '"embedded"')
        yield "coordinators without a token", lambda: candidate.update(automountServiceAccountToken=False)
        yield "coordinators without an address", lambda: candidate["containers"][0]["args"].pop()
        yield "coordinators on one host", lambda: candidate["affinity"]["podAntiAffinity"].pop(terms)
        yield "coordinators that cannot follow", lambda: peers["ingress"][0]["from"].pop()
        yield "coordinators that cannot reach the API server", lambda: peers["egress"].pop()
    else:
        yield "two coordinators that elect nobody", lambda: coordinator["spec"].update(replicas=2)
        yield (
            "a coordinator with a needless token",
            lambda: coordinator["spec"]["template"]["spec"].update(automountServiceAccountToken=True),
        )
    if any(one["kind"] == "ServiceMonitor" for one in documents):
        endpoint = of("ServiceMonitor", "node")["spec"]["endpoints"][0]
        yield "a monitor of an unknown port", lambda: endpoint.update(port="metrics")
        groups = of("PrometheusRule")["spec"]["groups"]
        yield "a rule with an unknown field", lambda: groups[0]["rules"][0].update(expression="1")
        yield "a monitor with an unknown field", lambda: endpoint.update(period="15s")
        yield (
            "scrapers from elsewhere",
            lambda: of("NetworkPolicy", "monitoring")["spec"]["ingress"][0]["from"][0]["namespaceSelector"][
                "matchLabels"
            ].update({"kubernetes.io/metadata.name": "default"}),
        )
    if any(one["kind"] == "Certificate" for one in documents):
        certificate = of("Certificate", "coordinator")["spec"]
        attributes = volume(pod, "tls")["csi"]["volumeAttributes"]
        yield "a coordinator with a node's name", lambda: certificate.update(uris=["larder://node/main"])
        yield "a certificate with an unknown field", lambda: certificate.update(dnsName="coordinator.larder")
        yield "an issuer that is not there", lambda: certificate["issuerRef"].update(name="larders")
        yield "an unknown key algorithm", lambda: certificate["privateKey"].update(algorithm="EC")
        yield (
            "a node with the host's name",
            lambda: attributes.update({"csi.cert-manager.io/uri-sans": "larder://node/${NODE_NAME}"}),
        )
    else:
        yield (
            "a Secret that nobody makes",
            lambda: volume(pod, "certificates")["secret"].update(secretName="larder-certificates"),
        )


def volume(pod, name):
    return next(one for one in pod["volumes"] if one["name"] == name)
