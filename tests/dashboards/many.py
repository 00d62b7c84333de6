"""Panels of two clusters: one has three coordinators, and a process of each has the same address. The Prometheus also scrapes
processes that are not Larder's."""

import json
import subprocess

import queries

COORDINATORS = {f'cluster="one",instance="{name}:7600"': "40" for name in "xyz"}
PROCESSES = [f'cluster="{cluster}",node="{node}",instance="10.0.0.5:9440"' for cluster, node in [("one", "a"), ("two", "b")]]
ROLES = {f'{labels},role="node"': "1" for labels in PROCESSES}
FOREIGN = 'job="other",instance="10.0.0.9:80"'
ALL_PROCESSES = [*PROCESSES, FOREIGN]
TOKENS = 'cluster="one",tenant="red",namespace="0123456789"'
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
    ("Does Prometheus reach every process?", "{{instance}}"): (
        {"up": dict.fromkeys(ALL_PROCESSES, "1"), "larder_build_info": ROLES},
        {f"up{{{labels}}}": 1 for labels in PROCESSES},
    ),
    ("Do file descriptors suffice?", "{{node}}"): (
        {
            "process_open_fds": dict.fromkeys(ALL_PROCESSES, "5"),
            "process_max_fds": dict.fromkeys(ALL_PROCESSES, "10"),
            "larder_build_info": ROLES,
        },
        {f"{{{labels}}}": 0.5 for labels in PROCESSES},
    ),
    ("Starts", "mark"): (
        {"process_start_time_seconds": dict.fromkeys(ALL_PROCESSES, "5"), "larder_build_info": ROLES},
        {f"{{{labels}}}": 5000 for labels in PROCESSES},
    ),
    ("How many chunks are cached?", "{{node}}"): (
        {"larder_cached_chunks": {f'cluster="one",node="a",tier="{tier}"': "7" for tier in ["device", "host", "disk"]}},
        {'{node="a"}': 7},
    ),
    # A second node's engines ask for nothing.
    ("Which namespaces hit how much?", "{{tenant}} {{short}}"): (
        {
            "larder_tokens_asked_total": {f'{TOKENS},node="a"': "0+100", f'{TOKENS},node="b"': "0"},
            "larder_tokens_hit_total": {f'{TOKENS},node="a",tier="host"': "0+60", f'{TOKENS},node="b",tier="host"': "0"},
        },
        {'{tenant="red",short="01234567"}': 0.6},
    ),
}
# The queries choose all clusters, as Grafana does at first, and all tenants; and an interval with several samples.
WIDER = {f'"{queries.CHOSEN[name]}"': '".*"' for name in ["$cluster", "$tenant"]} | {"[10s]": "[5m]"}


def check(dashboards, folder):
    """Evaluates the queries of panels and marks; returns how many there are."""
    asked = {
        (panel.title, legend): widened(queries.filled(query))
        for panel in queries.panels(dashboards)
        for legend, query in panel.queries.items()
    }
    marks = queries.marks(dashboards).items()
    asked |= {(name, "mark"): widened(queries.filled(mark["expr"])) for name, mark in marks}
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
