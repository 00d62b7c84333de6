"""Checks what is published: the crates of engines, and the Python package as source. Each has its license, a page whose links
work, and the version of all. Then makes a release, and checks it as its users do.

    tests/packages.py          the contents; the release has the program of the tests
    tests/packages.py build    also builds each from its package, as its users do; tests/run heavy does this

`cargo package` builds the crates against each other, not against a registry.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

sys.dont_write_bytecode = True
from parts import skip

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "debug/larder"
PUBLISHED = ["larder-protocol", "larder-device", "larder-ipc", "larder-client"]
# The most keywords that a registry takes, and the longest description that it shows in a list.
MOST_KEYWORDS, LONGEST_DESCRIPTION = 5, 120


def main(builds):
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    with tempfile.TemporaryDirectory(prefix="larder-packages-") as folder:
        say("crates", crates(Path(folder), version, builds))
        say("Python", python(Path(folder), version, builds))
        say("release", release(Path(folder)))
        if builds:
            interface()
    faults_are_found()


def interface():
    """Compares the client crate's interface with that of the newest release, or of $LARDER_BASELINE, a git revision."""
    tags = run("git", "tag", "--list", "v*", "--sort=-version:refname").split()
    baseline = os.environ.get("LARDER_BASELINE", tags[0] if tags else "")
    if subprocess.run(["cargo", "semver-checks", "--version"], capture_output=True, check=False).returncode != 0:
        skip("interface", "cargo install --locked cargo-semver-checks")
    elif not baseline:
        skip("interface", "there is no release before: LARDER_BASELINE names a git revision to compare with")
    else:
        run("cargo", "semver-checks", "--package", "larder-client", "--baseline-rev", baseline)
        say("interface", f"larder-client keeps what it had at {baseline}, or has another version")


def crates(folder, version, builds):
    """Packages the crates, and checks the packages."""
    manifest = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]
    for name in PUBLISHED:
        assert manifest["dependencies"][name]["version"] == version, f"{name} is another version where crates depend on it"
    # A folder of its own, so that it does not wait for a build of the tests.
    command = ["cargo", "package", "--locked", "--allow-dirty", "--target-dir", ROOT / "target/packages"]
    command += [word for name in PUBLISHED for word in ("--package", name)]
    run(*command, *([] if builds else ["--no-verify"]))
    for name in PUBLISHED:
        path = ROOT / f"target/packages/package/{name}-{version}.crate"
        files = contents(path, f"{name}-{version}/")
        package = tomllib.loads(files["Cargo.toml"].decode())["package"]
        has_licence(name, files, package["license"])
        assert package["version"] == version and package["readme"] == "README.md", f"{name}: {package}"
        assert 20 < len(package["description"]) <= LONGEST_DESCRIPTION, f"{name}: its description"
        assert 0 < len(package["keywords"]) <= MOST_KEYWORDS and package["categories"], f"{name}: its keywords"
        links_work(name, files["README.md"].decode())
    others = [one for one in members() if one["publish"] is None and one["name"] not in PUBLISHED]
    assert not others, f"to be published, but not checked here: {[one['name'] for one in others]}"
    return f"{len(PUBLISHED)} packages of {version}" + (", each built from its package" if builds else "")


def python(folder, version, builds):
    """Checks the package as source, which has all crates that it consists of."""
    path = Path(run("client/python/wheel", "source").strip())
    files = contents(path, f"larder_kv-{version}/")
    metadata = files["PKG-INFO"].decode()
    assert f"\nVersion: {version}\n" in metadata and "\nLicense-Expression: Apache-2.0\n" in metadata, metadata[:500]
    assert "\nLicense-File: LICENSE\n" in metadata, metadata[:500]
    has_licence("larder-kv", files, "Apache-2.0")
    links_work("larder-kv", metadata.partition("\n\n")[2])
    if not builds:
        return f"the source of {version}"
    venv = folder / "venv"
    run(sys.executable, "-m", "venv", venv)
    run(venv / "bin/pip", "install", "--quiet", "--disable-pip-version-check", path)
    run(venv / "bin/python", "-c", "import larder_kv; larder_kv.Session", cwd=folder)
    return f"the source of {version}, installed with pip"


def release(folder):
    """Makes a release with a key of its own; users check it by the commands of the book."""
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key")
    made = folder / "made"
    run("deploy/release", made, "--key", folder / "key", "--program", PROGRAM)
    signers = folder / "allowed_signers"
    signers.write_text(f'releases@larder namespaces="larder-release" {(folder / "key.pub").read_text()}')
    checks = re.search(r"<!-- not run: tests/packages.py .*? -->\n```sh\n(.*?)```", (ROOT / "docs/book/src/upgrade.md").read_text(), re.S)[1]
    commands = f"set -e\n{checks}".replace("larder-signers", str(signers))
    passed = run("sh", "-c", commands, cwd=made)
    names = re.findall(r"^(\S+): OK$", passed, re.M)
    assert len(names) == len(list(made.iterdir())) - 2, f"not all files have sums: {passed}"
    assert json.loads(next(made.glob("*.cdx.json")).read_text())["bomFormat"] == "CycloneDX"
    (archive,) = made.glob("larder-*.tar.gz")
    files = contents(archive, archive.name.removesuffix(".tar.gz") + "/")
    assert files["larder"] == PROGRAM.read_bytes() and {"LICENSE", "config/node.toml", "man/larder-node.1"} <= set(files), sorted(files)
    # A changed file, or a changed sum, is found.
    for name in [archive.name, "SHA256SUMS"]:
        before = (made / name).read_bytes()
        (made / name).write_bytes(before.replace(before[:1], bytes([before[0] ^ 1]), 1))
        assert subprocess.run(["sh", "-c", commands], cwd=made, capture_output=True, check=False).returncode, f"changed, not found: {name}"
        (made / name).write_bytes(before)
    return f"{len(names)} files, their sums and signature checked by the commands of the book"


def has_licence(name, files, said):
    assert said == "Apache-2.0", f"{name}: {said}"
    assert files.get("LICENSE") == (ROOT / "LICENSE").read_bytes(), f"{name} lacks the text of the licence"


def links_work(name, page):
    """On the page of a registry: a link into this repository's folders leads nowhere there."""
    links = re.findall(r"\]\(([^)\s]+)\)", page) + re.findall(r"^\[[^\]]+\]: (\S+)", page, re.M)
    for link in links:
        crate = re.fullmatch(r"https://docs\.rs/([\w-]+)", link)
        assert crate and crate[1] in PUBLISHED, f"{name}: its page has a link that leads nowhere there: {link}"
    assert name.startswith("larder") and page.lstrip().startswith(f"# {name}\n"), f"{name}: its page is about something else"


def faults_are_found():
    """Checks that faults that are planted on purpose are found."""
    for what, page in {"a link into a folder": "# larder-ipc\n[x](../../README.md)", "another page": "# larder\n"}.items():
        try:
            links_work("larder-ipc", page)
        except AssertionError:
            continue
        raise AssertionError(f"not found: {what}")


def contents(path, prefix):
    """The files in an archive, by their names below the prefix."""
    with tarfile.open(path) as archive:
        members = [one for one in archive.getmembers() if one.isfile()]
        assert all(one.name.startswith(prefix) for one in members), f"{path.name}: a file stands elsewhere"
        return {one.name.removeprefix(prefix): archive.extractfile(one).read() for one in members}


def members():
    text = run("cargo", "metadata", "--no-deps", "--format-version", "1", "--locked", "--offline")
    return json.loads(text)["packages"]


def run(*command, cwd=ROOT):
    ran = subprocess.run([str(word) for word in command], cwd=cwd, text=True, capture_output=True, check=False, env=os.environ)
    assert ran.returncode == 0, f"{' '.join(map(str, command))}\n{ran.stdout}{ran.stderr}"
    return ran.stdout


def say(what, detail):
    print(f"{what}: {detail}", flush=True)


if __name__ == "__main__":
    main("build" in sys.argv[1:])
