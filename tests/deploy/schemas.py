"""Checks documents against the schemas of Kubernetes, and against the types of its extensions."""

import json
import subprocess

import kubernetes_validate

import tools
from tools import found

CRDS = {
    "ServiceMonitor": ("prometheus-operator", "monitoring.coreos.com/v1"),
    "PrometheusRule": ("prometheus-operator", "monitoring.coreos.com/v1"),
    "Certificate": ("cert-manager", "cert-manager.io/v1"),
    "Issuer": ("cert-manager", "cert-manager.io/v1"),
}
# The oldest and the newest Kubernetes that the manifests are for.
VERSIONS = ["1.27", "1.37"]


def schema_problems(documents, version=VERSIONS[-1]):
    """The problems of documents by the schemas of a version of Kubernetes; unknown fields are problems too."""
    wrong = []
    for document in documents:
        if document["kind"] not in CRDS:
            try:
                kubernetes_validate.validate(document, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                wrong.append(f"{document['kind']} {document['metadata']['name']}: {error.message}")
    return wrong


def custom_resource_problems(documents):
    """Type errors of the custom resources: all documents in one run of the compiler."""
    folder = tools.custom_resource_types()
    resources = [document for document in documents if document["kind"] in CRDS]
    wrong = [f"{one['kind']} of {one['apiVersion']}" for one in resources if one["apiVersion"] != CRDS[one["kind"]][1]]
    if wrong:
        return len(resources), wrong
    lines = [
        f'import {{ {kind} }} from "@kubernetes-models/{package}/{version}/{kind}";'
        for kind, (package, version) in CRDS.items()
    ]
    for one in resources:
        content = {key: value for key, value in one.items() if key not in ("apiVersion", "kind")}
        lines.append(f"new {one['kind']}({json.dumps(content)}).validate();")
    (folder / "check.mts").write_text("\n".join(lines))
    options = ["--strict", "--skipLibCheck", "--module", "nodenext", "--target", "es2022"]
    compiled = subprocess.run(
        [folder / "node_modules/.bin/tsc", *options, "check.mts"],
        cwd=folder,
        text=True,
        capture_output=True,
        check=False,
    )
    if compiled.returncode != 0:
        return len(resources), compiled.stdout.strip().splitlines()
    # Constraints beyond types, such as the pattern of a text.
    validated = subprocess.run([found("node"), "check.mjs"], cwd=folder, text=True, capture_output=True, check=False)
    return len(resources), validated.stderr.strip().splitlines()
