"""Says whether an engine on this host could use a node: `python -m larder_kv.check --socket PATH`.

Each finding of a problem has a remedy. The exit code is 0 if an engine could use the node, 1 if it could not, and 2 for wrong
arguments.
"""

import argparse
import importlib.util
import json
import os
import platform
import resource
import secrets
import stat
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import larder_kv
from larder_kv.settings import NodeSettings, UnsupportedError

Outcome = Literal["ok", "note", "failed", "skipped"]

ENGINES = {"vllm": "0.32", "sglang": "0.5.23", "lmcache": "0.5.6"}
"""Engines, and the versions with which the adapters are tested."""
OTHERS = ("torch", "prometheus_client")
BLOCK_BYTES = 64 << 10
LEAST_FILES, LEAST_SHARED_BYTES = 1_024, 1 << 30


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    outcome: Outcome
    found: str
    advice: str = ""
    """The remedy of a problem."""


def main(arguments: list[str] | None = None) -> int:
    """Prints the findings, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m larder_kv.check", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--socket", required=True, help="the tenant's socket, as in the engine's settings")
    parser.add_argument("--device", type=int, help="the node's actor, as in the engine's settings")
    parser.add_argument("--window-bytes", type=int, default=64 << 20, help="the write window that the engine asks for")
    parser.add_argument("--timeout-seconds", type=float, default=5.0, help="how long the node may take to answer")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    given = vars(parser.parse_args(arguments))
    as_json = given.pop("json")
    try:
        settings = NodeSettings.parse(given, "the command line")
    except UnsupportedError as error:
        parser.error(str(error))
    findings = check(settings)
    usable = all(one.outcome in ("ok", "note") for one in findings)
    print(json.dumps({"usable": usable, "findings": [asdict(one) for one in findings]}) if as_json else page(findings, usable))
    return 0 if usable else 1


def page(findings: list[Finding], usable: bool) -> str:
    """The findings for people."""
    width = max(len(one.name) for one in findings)
    lines = []
    for one in findings:
        lines.append(f"{one.outcome:<8}{one.name:<{width}}  {one.found}")
        if one.advice:
            lines.append(f"{'':<{width + 10}}-> {one.advice}")
    return "\n".join([*lines, "", "An engine can use this node." if usable else "No engine can use this node as it is."])


def check(settings: NodeSettings) -> list[Finding]:
    """Looks at everything that an engine needs; checks that need a session are skipped without one."""
    findings = [package(), socket_file(settings.socket)]
    session, opened = connect(settings)
    findings.append(opened)
    with_session: list[tuple[str, Callable[[larder_kv.Session], Finding]]] = [
        ("tenant", tenant),
        ("window", lambda session: window(session, settings.window_bytes)),
        ("put and get", put_and_get),
    ]
    for name, look in with_session:
        if session is None:
            findings.append(Finding(name, "skipped", "there is no session"))
            continue
        try:
            findings.append(look(session))
        except larder_kv.LarderError as error:
            findings.append(Finding(name, "failed", str(error), "look at the node's log and `larder status`"))
    if session is not None:
        session.close()
    return [*findings, descriptors(), address_space(), shared_memory(), gpu(), *map(engine, ENGINES), *map(extra, OTHERS)]


def package() -> Finding:
    """This package."""
    return Finding("package", "ok", f"larder-kv {larder_kv.__version__}, Python {platform.python_version()}")


def socket_file(path: str) -> Finding:
    """The tenant's socket in the file system."""
    name = "socket"
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return Finding(name, "failed", f"{path} is not there", absent(Path(path)))
    except OSError as error:
        return Finding(name, "failed", str(error), "let this user search the folders on the way to the socket")
    if not stat.S_ISSOCK(status.st_mode):
        return Finding(name, "failed", f"{path} is no socket", "give the path of [[tenants]] in the node's configuration")
    of = f"{path}, {stat.filemode(status.st_mode)}, user {status.st_uid}, group {status.st_gid}"
    if not os.access(path, os.R_OK | os.W_OK, effective_ids=True):
        groups = "this user may not open it: run the engine as the node's user, or put its user into the socket's group"
        return Finding(name, "failed", of, groups)
    return Finding(name, "ok", of)


def absent(path: Path) -> str:
    """The remedy for a missing socket."""
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}: in a container, mount the node's folder of sockets there"
    others = sorted(str(other) for other in path.parent.iterdir() if other.is_socket())[:5]
    here = f"; the sockets here are {', '.join(others)}" if others else ""
    return f"start the node, or give the path of [[tenants]] in its configuration{here}"


def connect(settings: NodeSettings) -> tuple[larder_kv.Session | None, Finding]:
    """A session, as an engine opens it."""
    name = "session"
    try:
        session = settings.open_session("larder_kv.check", settings.window_bytes, settings.device)
    except larder_kv.RefusedError as error:
        versions = "install the larder-kv that was released with the node" if error.code == "version" else ""
        device = "choose a `device` that the node has, or leave it out" if error.code == "unknown" else ""
        return None, Finding(name, "failed", str(error), versions or device or "look at the node's log")
    except larder_kv.BusyError as error:
        more = "raise `session.max_sessions` or the tenant's `max_window_bytes` in the node's configuration, or end engines"
        return None, Finding(name, "failed", str(error), more)
    except larder_kv.RequestTimeout:
        seconds = f"the node does not answer within {settings.timeout_seconds} s"
        return None, Finding(name, "failed", seconds, "is it stopped, or very busy? `larder status` shows it")
    except larder_kv.EndedError as error:
        return None, Finding(name, "failed", str(error), "install the larder-kv that was released with the node")
    except (larder_kv.LarderError, OSError) as error:
        return None, Finding(name, "failed", str(error), "start the node")
    return session, Finding(name, "ok", f"node {session.node}, actor {session.device}, the same protocol")


def tenant(session: larder_kv.Session) -> Finding:
    """The tenant of the socket."""
    return Finding("tenant", "ok", f"{session.tenant}: its engines share KV with each other, and with no other tenant")


def window(session: larder_kv.Session, asked: int) -> Finding:
    """The room in which an engine hands its blocks over."""
    given = session.window_bytes
    if given == 0:
        return Finding("window", "ok", "none is needed: the node trusts this tenant to write into its memory")
    if given < asked:
        more = "raise `session.max_window_bytes` in the node's configuration if two blocks need more"
        return Finding("window", "note", f"{given} bytes of the {asked} asked for", more)
    return Finding("window", "ok", f"{given} bytes: no block may have more, and two should fit")


def put_and_get(session: larder_kv.Session) -> Finding:
    """A block that goes to the node's memory and comes back."""
    name = "put and get"
    pool = larder_kv.Pool(layers=1, layer_bytes=BLOCK_BYTES)
    spec = larder_kv.NamespaceSpec(
        model="larder_kv.check",
        kv_dtype="bytes",
        layout="check",
        # Routers ask for prompts in namespaces of known hashes.
        hash_algorithm="check",
        chunk_tokens=16,
        pools=[pool],
        flat=True,
    )
    namespace = session.register(spec)
    chain, sent = namespace.chain([secrets.token_bytes(32)]), secrets.token_bytes(BLOCK_BYTES)
    try:
        reservation = session.reserve(namespace, chain)
        staged = session.stage(reservation, 0)
        staged.copy_from(sent)
        kept = session.commit(reservation, [staged])
    except larder_kv.BusyError as error:
        more = "the tenant's part of the node's memory is in use by leases, pins and saves: give it more (`arena_bytes`, `max_bytes`)"
        return Finding(name, "failed", f"there is no room for {BLOCK_BYTES} bytes: {error}", more)
    except larder_kv.WindowError as error:
        return Finding(name, "failed", str(error), "ask for a larger window (`--window-bytes`)")
    came = bytearray(BLOCK_BYTES)
    with session.lease(namespace, chain) as lease:
        if kept != 1 or lease.chunks != 1:
            return Finding(name, "failed", "a block was gone right after it was put", "give the node more memory")
        lease.copy_block(0, came)
    if came != sent:
        return Finding(name, "failed", "a block came back with other bytes", "test this host's memory, and report it")
    return Finding(name, "ok", f"{BLOCK_BYTES} bytes came back as they were put")


def descriptors() -> Finding:
    """Checks how many files this process may open: each part of the node's memory is one while it is mapped."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} may be open (at most {hard})"
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        return Finding("open files", "note", found, f"`ulimit -n {LEAST_FILES}` or more for the engine")
    return Finding("open files", "ok", found)


def address_space() -> Finding:
    """Checks the limit of address space: engines map the node's memory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return Finding("address space", "ok", "unlimited")
    return Finding(
        "address space", "note", f"{soft} bytes", "`ulimit -v unlimited`: an engine maps all of the node's memory that it reads"
    )


def shared_memory() -> Finding:
    """Checks the container's shared memory: ranks of an engine talk through it. The node's own memory needs none of it."""
    try:
        system = os.statvfs("/dev/shm")
    except OSError as error:
        return Finding("/dev/shm", "note", str(error), "engines of several ranks need it: mount a tmpfs there")
    free = system.f_bavail * system.f_frsize
    if free < LEAST_SHARED_BYTES:
        return Finding("/dev/shm", "note", f"{free} bytes free", "engines of several ranks need more: `--shm-size` of the container")
    return Finding("/dev/shm", "ok", f"{free} bytes free")


def gpu() -> Finding:
    """Copies between a GPU and blocks."""
    try:
        return Finding("GPU", "ok", larder_kv.Gpu(0).name)
    except larder_kv.GpuError as error:
        return Finding("GPU", "note", f"KV caches in host memory only: {error}")


def engine(name: str) -> Finding:
    """An engine, and whether its adapter is tested with this version."""
    found, tested = installed(name), ENGINES[name]
    if found is None:
        return Finding(name, "note", "not installed here")
    if found != tested and not found.startswith(f"{tested}."):
        return Finding(name, "note", found, f"its adapter is tested with {tested}")
    return Finding(name, "ok", found)


def extra(name: str) -> Finding:
    """A package that engines bring along."""
    found = installed(name)
    return Finding(name, "ok", found) if found else Finding(name, "note", "not installed here")


def installed(name: str) -> str | None:
    """The version of a module; None if it is not installed."""
    if importlib.util.find_spec(name) is None:
        return None
    for package in (name, f"{name}-cpu", name.replace("_", "-")):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "of an unknown version"


if __name__ == "__main__":
    sys.exit(main())
