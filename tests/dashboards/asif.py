"""Alerts over the metrics of a real node, of which one has another value: for causes that no test can afford.

LarderDirectoryFull: a home keeps a million rows at least, however little memory its host has. To save more chunks than that would take the
tests longer than all other causes together.
"""

import json
import re
import subprocess

# Alert, metric, and the value that it comes to.
AS_IF = [("LarderDirectoryFull", "larder_directory_missing_rows", 5)]
# `for` of every alert here is shorter.
MINUTES, AT_MINUTE = 60, 30


def alerts(exported, rules, folder):
    """Evaluates the rules over a node's metrics, as they are and with the other value; yields the alerts that fire for the latter alone."""
    for alert, metric, value in AS_IF:
        series = [f"{name} {number}" for name, number in re.findall(rf"^({metric}(?:\{{.*\}})?) (\S+)$", exported, re.M)]
        assert series, f"no node exports {metric}"
        for values, fires in [(f"0x{MINUTES}", False), (f"0x{AT_MINUTE} {value}x{MINUTES - AT_MINUTE}", True)]:
            asked = {"expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)', "eval_time": f"{MINUTES}m"}
            test = {
                "interval": "1m",
                "input_series": [{"series": labelled(one.rpartition(" ")[0]), "values": values} for one in series],
                "promql_expr_test": [asked | {"exp_samples": [{"labels": "{}", "value": len(series) if fires else 0}]}],
            }
            path = folder / f"{alert}-{fires}.json"
            path.write_text(json.dumps({"rule_files": [str(rule) for rule in rules], "evaluation_interval": "1m", "tests": [test]}))
            ran = subprocess.run(["promtool", "test", "rules", path], text=True, capture_output=True, check=False)
            assert ran.returncode == 0, ran.stdout + ran.stderr
        yield alert, metric, value


def labelled(series):
    """A series with the labels that a scraper adds."""
    name, _, labels = series.partition("{")
    own = [labels.rstrip("}")] if labels else []
    return name + "{" + ",".join([*own, 'cluster="c",node="a",instance="i",job="larder"']) + "}"
