"""Checks the license of every dependency against the list in deny.toml, with only Python and cargo."""

import json
import re
import subprocess
import sys
import tomllib

with open("deny.toml", "rb") as file:
    allowed = set(tomllib.load(file)["licenses"]["allow"])
# The features of the images beyond the default.
features = "larder-cli/etcd,larder-cli/kubernetes,larder-cli/tokenizers"
# Packages that are built only for other systems are no part of Larder.
command = ["cargo", "metadata", "--format-version", "1", "--locked", "--features", features]
for target in ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"]:
    command += ["--filter-platform", target]
metadata = json.loads(subprocess.check_output(command))


def is_allowed(expression: str) -> bool:
    """Whether an SPDX expression can be met with allowed licenses."""
    expression = expression.replace("/", " OR ")
    tokens = re.findall(r"\(|\)|[^\s()]+(?:\s+WITH\s+[^\s()]+)?", expression)
    words = {"AND": "and", "OR": "or", "(": "(", ")": ")"}
    return eval("".join(f" {words.get(token, token in allowed)} " for token in tokens))


packages = metadata["packages"]
refused = [p for p in packages if not (p.get("license") and is_allowed(p["license"]))]
for package in refused:
    print(f"{package['name']} {package['version']}: {package.get('license')}", file=sys.stderr)
print(f"{len(packages)} packages, {len(refused)} with a licence that deny.toml does not allow")
sys.exit(1 if refused else 0)
