"""Checks deploy/sbom: it names what the program is linked with, and omits everything else."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def bill(*features):
    return json.loads(subprocess.check_output([sys.executable, ROOT / "deploy/sbom", *features]))


def main():
    plain, whole = bill(), bill("larder-cli/etcd,larder-cli/kubernetes")
    assert plain == bill(), "the same lock gives another bill"
    assert plain["serialNumber"] != whole["serialNumber"]
    names = {one["name"] for one in plain["components"]}
    assert {"quinn", "rkyv", "larder-core", "larder-net"} <= names, names
    # Only tests need the first two; elections need the third.
    assert not {"proptest", "larder-tests", "etcd-client"} & names, names
    assert "etcd-client" in {one["name"] for one in whole["components"]}
    known = {plain["metadata"]["component"]["bom-ref"], *(one["bom-ref"] for one in plain["components"])}
    assert {one["ref"] for one in plain["dependencies"]} == known
    assert {ref for one in plain["dependencies"] for ref in one["dependsOn"]} <= known
    for one in plain["components"]:
        assert one["licenses"], one
        own = one["name"].startswith("larder-")
        assert own or len(one["hashes"][0]["content"]) == 64, one
    print(f"{len(names)} packages, {len(whole['components'])} with elections")


if __name__ == "__main__":
    main()
