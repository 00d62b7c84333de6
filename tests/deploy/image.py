"""Builds the image with buildah, out of stand-ins for the two images that it is made from.

All that the Dockerfile says is done but the compilation: where the toolchain would compile the program, a script of
the same name hands out one that is there. The stand-ins have busybox and what the program loads.
"""

import os
import re
import shutil

from live import larder
from tools import ROOT, Missing, found, run

CARGO = """#!/bin/sh
# Stands for the toolchain: checks what it was given, and hands out a program that was built before.
set -eu
[ "$*" = "build --profile dist --locked --package larder-cli --bin larder --features etcd,kubernetes" ]
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
CONTEXT = "Cargo.lock Cargo.toml README.md client coordinator deploy node tests "
ISOLATION = ["--isolation", "chroot"]


def builds_twice_the_same(folder):
    """Builds it twice with one timestamp, runs it, and returns what was found."""
    store = [found("buildah"), "--root", folder / "root", "--runroot", folder / "runroot", "--storage-driver", "vfs"]
    busybox = found("busybox")
    if os.geteuid() != 0:
        raise Missing("building in a chroot needs root")
    program = larder()
    # In the store's own stand-in for a registry: nothing is pulled.
    base = root_of(folder / "base", busybox, program)
    stand_in(store, folder, "stand-in-base", base)
    (base / "prebuilt").mkdir()
    shutil.copy(program, base / "prebuilt/larder")
    for name, script in [("cargo", CARGO.replace("CONTEXT", CONTEXT)), ("apt-get", APT)]:
        (base / "bin" / name).write_text(script)
        (base / "bin" / name).chmod(0o755)
    stand_in(store, folder, "stand-in-rust", base)

    identities = []
    for name in ["one", "two"]:
        run(
            *store,
            "build",
            *ISOLATION,
            "--pull-never",
            "--no-cache",
            "--file",
            ROOT / "deploy/Dockerfile",
            "--ignorefile",
            ROOT / "deploy/Dockerfile.dockerignore",
            "--timestamp",
            "1700000000",
            "--tag",
            name,
            "--build-arg",
            "RUST_IMAGE=localhost/stand-in-rust",
            "--build-arg",
            "BASE_IMAGE=localhost/stand-in-base",
            ROOT,
        )
        identities.append(run(*store, "images", "--no-trunc", "--quiet", name).strip())
    assert identities[0] == identities[1], f"two builds differ: {identities}"

    container = run(*store, "from", "--pull-never", "localhost/one").strip()
    user = run(*store, "run", *ISOLATION, container, "--", "id", "-u").strip()
    assert user == "65532", f"it runs as {user}"
    version = run(*store, "run", *ISOLATION, container, "--", "/usr/bin/larder", "--version").strip()
    tools = run(
        *store, "run", *ISOLATION, container, "--", "sh", "-c", "for t in sed chown cp cat; do command -v $t; done"
    ).split()
    assert len(tools) == 4, tools
    config = run(
        *store, "inspect", "--format", "{{.OCIv1.Config.User}} {{.OCIv1.Config.Entrypoint}}", container
    ).strip()
    assert config == "65532:65532 [/usr/bin/larder]", config
    return f"{version}, as user {user}, twice the same"


def root_of(root, busybox, program):
    """A root file system of busybox and the libraries of the program."""
    for name in ["bin", "tmp", "etc", "usr/bin", "dev", "proc", "sys", "run"]:
        (root / name).mkdir(parents=True)
    shutil.copy(busybox, root / "bin/busybox")
    for name in run(busybox, "--list").split():
        if name != "busybox":
            (root / "bin" / name).symlink_to("busybox")
    for library in re.findall(r"(/\S+)", run("ldd", program)):
        (root / library[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.realpath(library), root / library[1:])
    return root


def stand_in(store, folder, name, root):
    """An image of a root file system."""
    (folder / "Dockerfile").write_text("FROM scratch\nCOPY base /\nENV PATH=/bin:/usr/bin\n")
    run(*store, "build", *ISOLATION, "--tag", name, "--file", folder / "Dockerfile", folder)
