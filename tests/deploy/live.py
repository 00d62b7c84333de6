"""Runs the real program with the settings of the manifests and units, as far as one machine can."""

import base64
import json
import os
import re
import signal
import socket
import subprocess
import time
import tomllib
import urllib.request
from contextlib import ExitStack
from pathlib import Path

from manifests import ISSUED_SECRETS, Manifests
from tools import ROOT, Missing, found, load_all, run

GPUS = {
    "0000:17:00.0": ("0x10de", "0x030200"),
    "0000:65:00.0": ("0x10de", "0x030000"),
    "0000:02:00.0": ("0x10de", "0x040300"),
    "0000:03:00.0": ("0x1a03", "0x030000"),
}


def larder():
    """The program: $LARDER, or the newest build in target."""
    built = [ROOT / "target" / profile / "larder" for profile in ["dist", "release", "debug"]]
    built = sorted((path for path in built if path.exists()), key=lambda path: path.stat().st_mtime)
    path = os.environ.get("LARDER") or (built[-1] if built else None)
    if path is None:
        raise Missing("the program is not built (cargo build), and $LARDER names none")
    return Path(path).resolve()


def detects_gpus(folder):
    """Checks that configure.sh fills in the zone, the address and the GPUs of a host, and refuses a host that has no GPU."""
    for address, (vendor, kind) in GPUS.items():
        device = folder / "sys/bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "vendor").write_text(vendor + "\n")
        (device / "class").write_text(kind + "\n")
    (folder / "out").mkdir()
    script = ROOT / "deploy/kubernetes/base/configure.sh"
    environment = {"PATH": os.environ["PATH"], "LARDER_NAME": "host-1", "LARDER_ZONE": "rack-4", "LARDER_GPUS": "detect"}
    template = ROOT / "deploy/kubernetes/overlays/gpu"
    run("sh", script, template, folder / "out", env=environment | {"LARDER_SYS": str(folder / "sys")})
    config = (folder / "out/node.toml").read_text()
    assert re.findall(r'\[\[gpus\]\]\npci = "(.*)"', config) == ["0000:17:00.0", "0000:65:00.0"], config
    assert 'name = "host-1"' in config, config
    assert tomllib.loads(config)["cluster"]["zone"] == "rack-4", config
    (folder / "template").mkdir()
    (folder / "template/node.toml").write_text('[cluster]\nadvertise = "@HOST_IP@:9441"\n')
    for address, advertised in [("192.0.2.1", "192.0.2.1:9441"), ("2001:db8::1", "[2001:db8::1]:9441")]:
        environment_of_host = {"PATH": os.environ["PATH"], "LARDER_NAME": "host-1", "LARDER_HOST_IP": address}
        run("sh", script, folder / "template", folder / "out", env=environment_of_host)
        assert tomllib.loads((folder / "out/node.toml").read_text())["cluster"]["advertise"] == advertised
    refused = subprocess.run(
        ["sh", script, template, folder / "out"],
        env=environment | {"LARDER_SYS": str(folder)},
        text=True,
        capture_output=True,
        check=False,
    )
    assert refused.returncode == 1, refused


def issued_secrets(folder):
    """Runs deploy/kubernetes/certificates with a kubectl that knows two hosts; returns the Secrets that it applies."""
    (folder / "bin").mkdir(parents=True)
    fake = folder / "bin/kubectl"
    fake.write_text(
        f'#!/bin/sh\ncase $1 in\nget) printf "node/host-1\\nnode/host-2.example\\n" ;;\n'
        f"apply) echo --- >>{folder}/applied && cat >>{folder}/applied ;;\n"
        f'*) exec {found("kubectl")} "$@" ;;\nesac\n'
    )
    fake.chmod(0o755)
    (folder / "bin/larder").symlink_to(larder())
    command = [ROOT / "deploy/kubernetes/certificates", folder / "ca"]
    environment = os.environ | {"PATH": f"{folder}/bin:{os.environ['PATH']}"}
    run(*command, env=environment)
    (folder / "applied").unlink()
    run(*command, env=environment)  # Again, as after a host is added: nothing is issued twice.
    secrets = {
        document["metadata"]["name"]: {key: base64.b64decode(value) for key, value in document["data"].items()}
        for document in load_all((folder / "applied").read_text())
        if document["kind"] == "Secret"
    }
    assert set(secrets) == ISSUED_SECRETS, set(secrets)
    hosts = {f"{host}.{ending}" for host in ["host-1", "host-2.example"] for ending in ["pem", "key"]}
    assert set(secrets["larder-node-certificates"]) == hosts | {"ca.pem"}, set(secrets["larder-node-certificates"])
    return secrets


def secret_documents(secrets):
    """These Secrets as documents."""
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name},
            "data": {key: base64.b64encode(content).decode() for key, content in data.items()},
        }
        for name, data in secrets.items()
    ]


def openssl_certificate(folder, uri, dns, algorithm):
    """A certificate as another authority would make it, here openssl, from the names in the manifests."""
    folder.mkdir(parents=True, exist_ok=True)
    openssl, ca = found("openssl"), folder.parent / "authority"
    key = {"ec": ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"], "rsa": ["-newkey", "rsa:2048"]}[algorithm]
    if not ca.exists():
        ca.mkdir()
        run(
            openssl,
            "req",
            "-x509",
            *key,
            "-nodes",
            "-keyout",
            ca / "key",
            "-out",
            ca / "pem",
            "-days",
            "1",
            "-subj",
            "/CN=authority",
            "-addext",
            "keyUsage=keyCertSign,digitalSignature",
        )
    run(openssl, "req", *key, "-nodes", "-keyout", folder / "key", "-out", folder / "csr", "-subj", "/")
    # cert-manager writes keys in the older encodings: PKCS #1 and SEC 1.
    run(openssl, "pkey", "-traditional", "-in", folder / "key", "-out", folder / "tls.key")
    (folder / "ext").write_text(
        f"subjectAltName=critical,URI:{uri},DNS:{dns}\nkeyUsage=digitalSignature\n"
        "extendedKeyUsage=serverAuth,clientAuth\nbasicConstraints=CA:FALSE\n"
    )
    run(
        openssl,
        "x509",
        "-req",
        "-in",
        folder / "csr",
        "-CA",
        ca / "pem",
        "-CAkey",
        ca / "key",
        "-CAcreateserial",
        "-days",
        "1",
        "-extfile",
        folder / "ext",
        "-out",
        folder / "tls.crt",
    )
    (folder / "ca.crt").write_bytes((ca / "pem").read_bytes())


def issue_as_pods_do(folder, all_, tls):
    """Runs the containers that issue certificates from the authority of the chart; twice, as when a pod's sandbox is made anew."""
    authority = folder / "authority"
    authority.mkdir()
    (secret,) = all_.of("Secret")
    for name, content in secret["data"].items():
        mounted(authority / name, base64.b64decode(content))
    (folder / "bin").mkdir()
    (folder / "bin/larder").symlink_to(larder())
    for component, to in tls.items():
        containers = all_.workload(component)["spec"]["template"]["spec"]["initContainers"]
        (container,) = [one for one in containers if one["name"] == "certificate"]
        here = {"/etc/larder/authority": str(authority), "/etc/larder/tls": str(to), "$(LARDER_NAME)": "host-1"}
        here |= {"/etc/larder/template": str(folder / "template"), "/etc/larder/config": str(folder / "template")}
        for _ in range(2):
            command = [replaced(word, here) for word in container["command"] + container["args"]]
            run(*unprivileged(folder), *command, env={"PATH": f"{folder}/bin:{os.environ['PATH']}"})
        assert sorted(path.name for path in to.iterdir()) == ["ca.crt", "tls.crt", "tls.key"], list(to.iterdir())


def cluster(folder, documents):
    """Starts a coordinator and a node with the configurations of these manifests, and waits until the node is a member."""
    all_ = Manifests(documents)
    program = larder()
    folder.mkdir(parents=True)
    data = {key: text for one in all_.of("ConfigMap") for key, text in one["data"].items()}
    template, config = folder / "template", folder / "config"
    coordinator_tls, node_tls = folder / "coordinator-tls", folder / "node-tls"
    for path in [template, config, coordinator_tls, node_tls, folder / "state", folder / "node-state", folder / "sockets"]:
        path.mkdir()
    for name, text in data.items():
        (template / name).write_text(text)
    arguments = [template, config]
    if all_.of("Certificate"):
        attributes = next(
            volume for volume in all_.workload("node")["spec"]["template"]["spec"]["volumes"] if volume["name"] == "tls"
        )["csi"]["volumeAttributes"]
        uri = attributes["csi.cert-manager.io/uri-sans"].replace("${POD_NAME}", "host-1")
        openssl_certificate(node_tls, uri, attributes["csi.cert-manager.io/dns-names"], "rsa")
        spec = all_.named("Certificate", "larder-coordinator")["spec"]
        openssl_certificate(coordinator_tls, spec["uris"][0], spec["dnsNames"][0], "ec")
    elif all_.of("Secret"):
        issue_as_pods_do(folder, all_, {"coordinator": coordinator_tls, "node": node_tls})
    else:
        secrets = issued_secrets(folder / "issued")
        for name, content in secrets["larder-coordinator-certificate"].items():
            (coordinator_tls / name).write_bytes(content)
        (folder / "certificates").mkdir()
        for name, content in secrets["larder-node-certificates"].items():
            mounted(folder / "certificates" / name, content)
        arguments += [folder / "certificates", node_tls]
    for _ in range(2):
        configure = ["sh", template / "configure.sh", *arguments]
        run(*unprivileged(folder), *configure, env={"PATH": os.environ["PATH"], "LARDER_NAME": "host-1"})

    http, peer, node_http, node_peer = free_ports()
    here = {
        "/etc/larder/tls": str(coordinator_tls),
        "/var/lib/larder": str(folder / "state"),
        "0.0.0.0:7600": f"127.0.0.1:{http}",
        "0.0.0.0:7601": f"127.0.0.1:{peer}",
        "[::]:7600": f"[::]:{http}",
        "[::]:7601": f"[::]:{peer}",
    }
    (config / "coordinator.toml").write_text(replaced((template / "coordinator.toml").read_text(), here))
    here = {
        "/etc/larder/tls": str(node_tls),
        "/run/larder": str(folder / "sockets"),
        "/var/lib/larder": str(folder / "node-state"),
        "larder-coordinator:7601": f"127.0.0.1:{peer}",
        "0.0.0.0:9440": f"127.0.0.1:{node_http}",
        "0.0.0.0:9441": f"127.0.0.1:{node_peer}",
        "[::]:9440": f"[::]:{node_http}",
        "[::]:9441": f"[::]:{node_peer}",
    }
    text = replaced((config / "node.toml").read_text(), here)
    text = re.sub(r'arena_bytes = ".*"', 'arena_bytes = "16MiB"', text)
    # Smaller than a drive, and in pieces that fit.
    text = re.sub(r'capacity_bytes = ".*"', 'capacity_bytes = "64MiB"\nsegment_bytes = "4MiB"', text)
    (config / "node.toml").write_text(text)

    running = []
    with ExitStack() as stack:
        for component in ["coordinator", "node"]:
            container = all_.workload(component)["spec"]["template"]["spec"]["containers"][0]
            args = [replaced(arg, {"/etc/larder/config": str(config)}) for arg in container["args"]]
            running.append(stack.enter_context(process(program, args, folder)))
        until(lambda: get(node_http, "/readyz") and get(http, "/readyz"), *running)
        members = until(lambda: json.loads(get(http, "/status"))["nodes"], *running)
        assert [member["name"] for member in members] == ["host-1"], members
        assert get(node_http, "/healthz") and get(http, "/healthz")
        if "disk" in all_.config("node"):
            assert b'larder_disk_closed{device="0"} 0' in get(node_http, "/metrics"), "its disk tier is not open"
        assert b"larder_" in get(node_http, "/metrics") and b"larder_" in get(http, "/metrics")
        for tenant in all_.config("node")["tenants"]:
            path = Path(replaced(tenant["socket"], here))
            assert path.is_socket() and path.stat().st_mode & 0o777 == 0o660, path


def mounted(path, content):
    """Writes a file as Kubernetes mounts it from a Secret with `defaultMode: 0440`."""
    path.write_bytes(content)
    path.chmod(0o440)


def unprivileged(folder):
    """The beginning of a command that runs as nobody and without capabilities, and owns `folder`; nothing if this process is not
    root."""
    if os.geteuid() != 0:
        return []
    run("chown", "--recursive", "65532:65532", folder)
    for path in [folder, folder.parent]:
        path.chmod(path.stat().st_mode | 0o011)
    return [found("setpriv"), *"--reuid 65532 --regid 65532 --clear-groups --no-new-privs --bounding-set -all".split()]


def default_files(folder):
    """Checks that the default configurations start: the program knows every key in them, including the commented-out keys."""
    secrets = folder / "etc"
    program = larder()
    run(program, "ca", "init", "--dir", secrets)
    run(program, "ca", "issue", "coordinator", "coordinator", "--dir", secrets)
    run(program, "ca", "issue", "node", "node", "--dir", secrets)
    http, peer, node_http, node_peer = free_ports()
    here = {
        "/etc/larder": str(secrets),
        "/var/lib/larder": str(folder),
        "/run/larder": str(folder),
        "/var/log/larder": str(folder),
        "0.0.0.0:7600": f"127.0.0.1:{http}",
        "0.0.0.0:7601": f"127.0.0.1:{peer}",
        # A node without a cluster would take the default port.
        '# listen = "0.0.0.0:9440"': f'listen = "127.0.0.1:{node_http}"',
        "0.0.0.0:9440": f"127.0.0.1:{node_http}",
        "0.0.0.0:9441": f"127.0.0.1:{node_peer}",
        "coordinator.example:7601": f"127.0.0.1:{peer}",
        "192.0.2.1:9441": f"127.0.0.1:{node_peer}",
        '"node-0"': '"node"',
        '"1GiB"': '"16MiB"',
        '"1TiB"': '"64MiB"',
        'segment_bytes = "256MiB"': 'segment_bytes = "1MiB"',
        '"32MiB"': '"2MiB"',
        "1000000": "1000",
    }
    text = (ROOT / "deploy/config/node.toml").read_text()
    # No GPU can be named here, and the object store is a folder; every other commented-out key is set.
    everything = re.sub(r"^# (?=\[(?:record|audit|kv_events|disk|object|cluster)\]$|[a-z_]+ = )", "", text, flags=re.M)
    everything = re.sub(r'^(?:pci = "0000:65:00.0"|endpoint = "https://s3.*|settings = .*)$', "", everything, flags=re.M)
    (folder / "objects").mkdir()
    here["s3://bucket/prefix"] = f"file://{folder}/objects"
    (folder / "coordinator.toml").write_text(replaced((ROOT / "deploy/config/coordinator.toml").read_text(), here))
    (folder / "plain.toml").write_text(replaced(text, here))
    (folder / "everything.toml").write_text(replaced(everything, here))
    with process(program, ["coordinator", "--config", folder / "coordinator.toml"], folder) as coordinator:
        until(lambda: get(http, "/readyz"), coordinator)
        for name in ["plain", "everything"]:
            with process(program, ["node", "--config", folder / f"{name}.toml"], folder) as node:
                until(lambda: get(node_http, "/readyz"), node)
                status = json.loads(get(node_http, "/status"))
                assert (status["cluster"] is not None) == (name == "everything"), status


class process:
    """A process that is ended with its block; it runs as nobody and without capabilities if this process is root."""

    def __init__(self, program, args, folder):
        command = [*unprivileged(folder), str(program), *map(str, args)]
        self.log = folder / f"{args[0]}.log"
        with self.log.open("w") as log:
            options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
            self.running = subprocess.Popen(command, cwd=folder, **options)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.running.send_signal(signal.SIGTERM)
        try:
            code = self.running.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.running.kill()
            self.running.wait()
            code = "none, killed after 30 s"
        assert kind is not None or code == 0, f"exit status {code}: {self.log.read_text()}"


def until(condition, *processes):
    """Returns the result of `condition` once it is true; the processes must keep running."""
    last = None
    for _ in range(300):
        for one in processes:
            assert one.running.poll() is None, f"it ended: {one.log.read_text().strip()}"
        try:
            if result := condition():
                return result
        except OSError as error:
            last = error
        time.sleep(0.1)
    raise AssertionError(f"not within 30 s: {last}")


def get(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return answer.read()


def replaced(text, replacements):
    for old, new in replacements.items():
        text = text.replace(old, new)
    return text


def free_ports():
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(4)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
