"""The queries of panels and rules: read, filled in, evaluated, judged."""

import json
import math
import re
import urllib.error
from dataclasses import dataclass, field, replace
from importlib import import_module

# The values that Grafana would fill in.
CHOSEN = {
    "$cluster": "dev",
    "$node": ".*",
    "$tenant": "default",
    "$__rate_interval": "10s",
    "$__range": "30s",
    "$price": "2",
}


@dataclass
class Panel:
    dashboard: str
    title: str
    # By legend.
    queries: dict
    # Whether a healthy cluster with work must show a value other than zero.
    must_move: bool
    json: dict
    answers: dict = field(default_factory=dict)

    def with_query(self, legend, query):
        return replace(self, queries={legend: query}, answers={})


def panels(folder):
    """All panels, from the JSON for Grafana."""
    for path in sorted(folder.glob("*.json")):
        described = {panel.title: panel for panel in import_module(path.stem).DASHBOARD.panels}
        for panel in json.loads(path.read_text())["panels"]:
            queries = {target["legendFormat"] or target["refId"]: target["expr"] for target in panel["targets"]}
            assert len(queries) == len(panel["targets"]), f"{path.stem}: {panel['title']}: two legends are the same"
            must_move = not described[panel["title"]].zero_is_fine
            yield Panel(path.stem, panel["title"], queries, must_move, panel)


def variables(folder):
    """The variables of all dashboards, each once."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        for variable in json.loads(path.read_text())["templating"]["list"]:
            if variable["type"] == "query":
                found[variable["name"]] = variable["query"]["query"]
    return list(found.items())


def marks(folder):
    """The annotations of all dashboards, each once."""
    return {
        mark["name"]: mark for path in sorted(folder.glob("*.json")) for mark in json.loads(path.read_text())["annotations"]["list"]
    }


class Asked:
    """Asks a Prometheus, and notes the problems."""

    def __init__(self, prometheus):
        self.prometheus = prometheus
        self.names = prometheus.names()
        self.problems = []
        self.count = 0

    def panel(self, panel):
        for legend, query in panel.queries.items():
            where = f"{panel.dashboard}: {panel.title} [{legend}]"
            series = self.ask(where, filled(query))
            panel.answers[legend] = series
            if series and panel.must_move and not any(value for one in series for value in numbers(one)):
                self.problems.append(f"{where}: stays at zero: {query}")
            for label in re.findall(r"\{\{(\w+)\}\}", legend):
                if series and not any(label in one["metric"] for one in series):
                    self.problems.append(f"{where}: no series has the label `{label}`")

    def rule(self, rule):
        """Checks that a recording rule answers, or that every operand of an alert answers: the alert itself should not fire."""
        if rule["type"] == "recording":
            self.ask(f"rule {rule['name']}", rule["name"])
        for operand in operands(rule["query"]):
            self.ask(f"rule {rule['name']}", operand)

    def mark(self, mark):
        """Checks that the operands of a mark have data, and the labels that its line shows: most marks mark nothing."""
        for operand in operands(mark["expr"]):
            series = self.ask(f"mark {mark['name']}", filled(operand))
            for label in re.findall(r"\{\{(\w+)\}\}", mark["textFormat"]):
                if series and not any(label in one["metric"] for one in series):
                    self.problems.append(f"mark {mark['name']}: no series has the label `{label}`")

    def variable(self, name, query):
        self.count += 1
        if not self.prometheus.values(filled(query)):
            self.problems.append(f"variable {name}: no values: {query}")

    def ask(self, where, query):
        self.count += 1
        unknown = sorted(metrics(query) - self.names)
        if unknown:
            self.problems.append(f"{where}: unknown metric: {', '.join(unknown)}")
            return []
        try:
            series = self.prometheus.range(query)
        except urllib.error.HTTPError as error:
            self.problems.append(f"{where}: {error.read().decode()}: {query}")
            return []
        if not any(True for one in series for _ in numbers(one)):
            self.problems.append(f"{where}: no data: {query}")
        return series


def numbers(series):
    """The values of a series that are numbers."""
    values = (float(value) for _, value in series["values"])
    return (value for value in values if not math.isnan(value))


def filled(query):
    for name, value in CHOSEN.items():
        query = query.replace(name, value)
    assert "$" not in re.sub(r'"[^"]*"', "", query), f"a variable that nobody fills in: {query}"
    return query


def metrics(query):
    """The names of metrics in a query: words that are no function, keyword, label or text."""
    text = re.sub(r'"[^"]*"', "", query)
    text = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", text)
    text = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", text)
    words = re.findall(r"(?<![\w.])([a-zA-Z_:][\w:]*)\b(?!\s*\()", text)
    return set(words) - {"by", "on", "and", "or", "unless", "bool", "group_left", "sum", "avg", "max", "min", "count"}


def operands(query):
    """The operands of an alert: the vectors between its outermost comparisons and set operators."""
    query = " ".join(query.split())
    parts, depth, start, at = [], 0, 0, 0
    while at < len(query):
        if query[at] in "({[":
            depth += 1
        elif query[at] in ")}]":
            depth -= 1
        elif query[at] == '"':
            at = query.index('"', at + 1)
        operator = OPERATOR.match(query, at) if depth == 0 else None
        if operator:
            parts.append(query[start:at])
            start = at = operator.end()
            continue
        at += 1
    parts.append(query[start:])
    result = []
    for part in (part.strip() for part in parts):
        inner = part[1:-1] if part.startswith("(") and part.endswith(")") else None
        if inner is not None and OPERATOR.search(inner):
            result += operands(inner)
        elif not re.fullmatch(r"[\d.]+", part):
            result.append(part)
    return result


OPERATOR = re.compile(
    r" (?:==|!=|>=?|<=?|and|or|unless) (?:(?:on|ignoring) \([^)]*\) )?(?:group_(?:left|right) \([^)]*\) )?"
)
