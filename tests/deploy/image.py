"""Builds the image with buildah, from stand-ins for its two base images: no registry is asked.

Quickly: everything in the Dockerfile is done except the compilation. In place of the toolchain, a script of the same name hands
out an existing program, and the stand-ins have busybox and the libraries of the program.

For real: the stand-ins are made of Debian's packages, and the machine's own toolchain compiles the program.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

from live import larder
from tools import ROOT, TOOLS, Missing, apt_installed, found, run

CARGO = """#!/bin/sh
# Stands for the toolchain: checks what it was given, and hands out a program that was built before.
set -eu
[ "$*" = "build --profile dist --locked --package larder-cli --bin larder --features etcd,kubernetes,tokenizers" ]
[ "$(ls -A | tr '\\n' ' ')" = "CONTEXT" ]
mkdir -p target/dist
cp /prebuilt/larder target/dist/larder
"""
APT = """#!/bin/sh
# Stands for the system's packages: checks which are asked for.
case "$*" in
update | "install --yes --no-install-recommends protobuf-compiler libprotobuf-dev") ;;
*) exit 1 ;;
esac
"""
STRIP = """#!/bin/sh
# Stands for the one of the toolchain's image: the program that is handed out stays as it is.
[ "$*" = /out/usr/bin/larder ]
"""
CONTEXT = "Cargo.lock Cargo.toml README.md client coordinator deploy node tests "
ISOLATION = ["--isolation", "chroot"]


class Store:
    """Images and containers in a folder of their own."""

    def __init__(self, folder):
        if os.geteuid() != 0:
            raise Missing("building in a chroot needs root")
        packages = ["buildah", "podman", "runc", "busybox", "ca-certificates"]
        buildah, podman, *_ = apt_installed("buildah", "podman", "runc", "busybox", packages=packages)
        self.folder = folder
        place = ["--root", folder / "root", "--runroot", folder / "runroot", "--storage-driver", "vfs"]
        self.buildah = [buildah, *place]
        # Podman's default starts containers in a control group that not every machine allows.
        self.podman = [podman, *place, "--cgroup-manager=cgroupfs", "--runtime", "runc"]

    def build(self, *arguments, **options):
        run(*self.buildah, "build", *ISOLATION, "--pull-never", *arguments, **options)

    def build_larder(self, name, *arguments, **options):
        """Builds deploy/Dockerfile; returns the image's identity."""
        file = ["--file", ROOT / "deploy/Dockerfile", "--ignorefile", ROOT / "deploy/Dockerfile.dockerignore"]
        bases = ["RUST_IMAGE=localhost/stand-in-rust", "BASE_IMAGE=localhost/stand-in-base"]
        bases = [word for base in bases for word in ("--build-arg", base)]
        stamp = ["--timestamp", "1700000000"]
        self.build("--no-cache", *file, *stamp, *bases, "--tag", name, *arguments, ROOT, **options)
        return run(*self.buildah, "images", "--no-trunc", "--quiet", name).strip()

    def stand_in(self, name, context, *lines):
        """Makes an image for the build to begin with."""
        (self.folder / "Dockerfile").write_text("\n".join(lines) + "\n")
        self.build("--tag", name, "--file", self.folder / "Dockerfile", context, timeout=1200)

    def in_image(self, image, *command):
        """The output of a command in the image."""
        container = run(*self.buildah, "from", "--pull-never", f"localhost/{image}").strip()
        try:
            return run(*self.buildah, "run", *ISOLATION, container, "--", *command).strip()
        finally:
            run(*self.buildah, "rm", container)


def builds_twice_the_same(store):
    """Builds the image `larder` twice with one timestamp and checks it; returns a summary."""
    busybox, program = found("busybox"), larder()
    base = root_of(store.folder / "base", busybox, program)
    store.stand_in("stand-in-base", store.folder, "FROM scratch", "COPY base /", "ENV PATH=/bin:/usr/bin")
    (base / "prebuilt").mkdir()
    shutil.copy(program, base / "prebuilt/larder")
    for name, script in [("cargo", CARGO.replace("CONTEXT", CONTEXT)), ("apt-get", APT), ("strip", STRIP)]:
        (base / "bin" / name).write_text(script)
        (base / "bin" / name).chmod(0o755)
    store.stand_in("stand-in-rust", store.folder, "FROM scratch", "COPY base /", "ENV PATH=/bin:/usr/bin")
    identities = [store.build_larder(name) for name in ["larder", "again"]]
    assert identities[0] == identities[1], f"two builds differ: {identities}"
    return f"{is_as_said(store)}, twice the same"


def is_as_said(store):
    """Checks that the image `larder` runs as nobody, and has everything that the manifests' init containers need."""
    user = store.in_image("larder", "id", "-u")
    assert user == "65532", f"it runs as {user}"
    version = store.in_image("larder", "/usr/bin/larder", "--version")
    needed = store.in_image("larder", "sh", "-c", "for t in sed chown cp mv rm cat grep larder; do command -v $t; done").split()
    assert len(needed) == 8, needed
    said = run(*store.podman, "inspect", "--format", "{{.Config.User}} {{.Config.Entrypoint}}", "localhost/larder").strip()
    assert said == "65532:65532 [/usr/bin/larder]", said
    return f"{version}, as user {user}"


def builds_for_real(store):
    """Compiles the program in the image `larder`; returns a summary. Takes some ten minutes, later times less."""
    kept = TOOLS / "image"
    base = debian(kept / "base")
    store.stand_in("stand-in-base", base, "FROM scratch", "COPY . /")
    # The toolchain and the downloaded crates are those of the machine.
    cargo_home = Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo"))
    toolchain = run("rustc", "--print", "sysroot").strip()
    (store.folder / "empty").mkdir()
    store.stand_in(
        "stand-in-rust",
        store.folder / "empty",
        "FROM localhost/stand-in-base",
        "RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev ca-certificates",
        "ENV CARGO_HOME=/usr/local/cargo PATH=/usr/local/rust/bin:/usr/local/bin:/usr/bin:/bin",
    )
    folders = {toolchain: "/usr/local/rust:ro", kept / "target": "/src/target"}
    folders |= {cargo_home / name: f"/usr/local/cargo/{name}" for name in ["registry", "config.toml"]}
    # Some machines trust authorities of their own.
    folders[Path("/etc/ssl/certs")] = "/etc/ssl/certs:ro"
    (kept / "target").mkdir(parents=True, exist_ok=True)
    volumes = [word for here, there in folders.items() if Path(here).exists() for word in ("--volume", f"{here}:{there}")]
    store.build_larder("larder", *volumes, timeout=5400)
    said = is_as_said(store)
    size = int(store.in_image("larder", "stat", "--format", "%s", "/usr/bin/larder"))
    compiled = (kept / "target/dist/larder").stat().st_size
    assert size < compiled, "the program is not stripped"
    whole = int(run(*store.podman, "inspect", "--format", "{{.Size}}", "localhost/larder"))
    return f"{said}, compiled by the Dockerfile: a program of {size / 1e6:.1f} MB stripped, in an image of {whole / 1e6:.0f} MB"


def debian(root):
    """A root file system of the Debian that the Dockerfile names, made from its packages."""
    (suite,) = re.findall(r"^ARG BASE_IMAGE=\S+/debian:(\w+)-slim$", (ROOT / "deploy/Dockerfile").read_text(), re.M)
    sources = Path("/etc/apt/sources.list.d/debian.sources")
    (debootstrap,) = apt_installed("debootstrap", packages=["debootstrap"])
    if not sources.exists():
        raise Missing(f"there is no {sources}")
    mirror = re.search(r"^URIs: (\S+)", sources.read_text(), re.M)[1]
    done = root.parent / "base-done"
    if not done.exists():
        shutil.rmtree(root, ignore_errors=True)
        root.parent.mkdir(parents=True, exist_ok=True)
        run(debootstrap, "--variant=minbase", suite, root, mirror, timeout=1200)
        done.touch()
    return root


def root_of(root, busybox, program):
    """A root file system of busybox and the program's libraries."""
    for name in ["bin", "tmp", "etc", "usr/bin", "dev", "proc", "sys", "run"]:
        (root / name).mkdir(parents=True)
    shutil.copy(busybox, root / "bin/busybox")
    for name in run(busybox, "--list").split():
        if name != "busybox":
            (root / "bin" / name).symlink_to("busybox")
    # Adds busybox's libraries too, unless it needs none: then ldd fails.
    of_busybox = subprocess.run(["ldd", busybox], capture_output=True, text=True, check=False).stdout
    for library in sorted(set(re.findall(r"(/\S+)", of_busybox + run("ldd", program)))):
        (root / library[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.realpath(library), root / library[1:])
    return root
