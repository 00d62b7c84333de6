"""Panels of two clusters: one has three coordinators, and a process of each has the same address."""

import json
import subprocess

import queries

COORDINATORS = {f'cluster="one",instance="{name}:7600"': "40" for name in "xyz"}
PROCESSES = [f'cluster="{cluster}",node="{node}",instance="10.0.0.5:9440"' for cluster, node in [("one", "a"), ("two", "b")]]
ROLES = {f'{labels},role="node"': "1" for labels in PROCESSES}
# By title and legend: the metrics that the query reads, with labels and values; and the answer.
PANELS = {
    ("Who is a member?", "coordinator: {{state}}"): (
        {"larder_coordinator_members": {f'{labels},state="alive"': value for labels, value in COORDINATORS.items()}},
        {'{state="alive"}': 40},
    ),
    ("Is a node lost?", "lost"): ({"larder_coordinator_lost_members": COORDINATORS}, {"{}": 40}),
    ("How much memory does each process have?", "{{node}} ({{role}})"): (
        {"process_resident_memory_bytes": dict.fromkeys(PROCESSES, "5"), "larder_build_info": ROLES},
        {'{node="a",role="node"}': 5, '{node="b",role="node"}': 5},
    ),
    ("How much CPU does each process use?", "{{node}} ({{role}})"): (
        {"process_cpu_seconds_total": dict.fromkeys(PROCESSES, "0+120"), "larder_build_info": ROLES},
        {'{node="a",role="node"}': 2, '{node="b",role="node"}': 2},
    ),
}
# The queries choose both clusters, and an interval with several samples.
WIDER = {f'"{queries.CHOSEN["$cluster"]}"': '".+"', "[10s]": "[5m]"}


def check(dashboards, folder):
    """Evaluates the panels' queries; returns how many there are."""
    asked = {
        (panel.title, legend): widened(queries.filled(query))
        for panel in queries.panels(dashboards)
        for legend, query in panel.queries.items()
    }
    tests = [
        {
            "name": " ".join(place),
            "interval": "1m",
            "input_series": [
                {"series": f"{metric}{{{labels}}}", "values": f"{value}x20"}
                for metric, all_values in series.items()
                for labels, value in all_values.items()
            ],
            "promql_expr_test": [
                {
                    "expr": asked[place],
                    "eval_time": "10m",
                    "exp_samples": [{"labels": labels, "value": value} for labels, value in answer.items()],
                }
            ],
        }
        for place, (series, answer) in PANELS.items()
    ]
    # promtool reads YAML, and JSON is YAML.
    path = folder / "panels.json"
    path.write_text(json.dumps({"evaluation_interval": "1m", "tests": tests}))
    ran = subprocess.run(["promtool", "test", "rules", path], text=True, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return len(tests)


def widened(query):
    for narrow, wide in WIDER.items():
        query = query.replace(narrow, wide)
    return query
