"""Grafana's JSON for panels that are described in a few words."""

import re
from dataclasses import dataclass, field

# What stands for the choice of cluster, node and tenant in a query.
CHOICES = {
    "@c": 'cluster=~"$cluster"',
    "@n": 'cluster=~"$cluster",node=~"$node"',
    "@t": 'cluster=~"$cluster",node=~"$node",tenant=~"$tenant"',
}

VARIABLES = [
    ("cluster", "Cluster", "label_values(larder_build_info, cluster)"),
    ("node", "Node", 'label_values(larder_build_info{cluster=~"$cluster",role="node"}, node)'),
    ("tenant", "Tenant", 'label_values(larder_tokens_asked_total{cluster=~"$cluster"}, tenant)'),
]


@dataclass
class Panel:
    """One question and the queries that answer it: by legend."""

    title: str
    unit: str
    description: str
    queries: dict[str, str]
    kind: str = "timeseries"
    # Whether the answer may be zero all the time in a healthy cluster that has work.
    zero_is_fine: bool = False
    stacked: bool = False
    most: float | None = None
    width: int = 12
    # The alert about this figure, and the value from which it counts: above, or below.
    alert: str | None = None
    above: float | None = None
    below: float | None = None

    def expressions(self):
        for legend, query in self.queries.items():
            for mark, choice in CHOICES.items():
                query = query.replace(mark, choice)
            yield legend, " ".join(query.split())


@dataclass
class Mark:
    """What a vertical line in every panel tells of."""

    name: str
    color: str
    query: str
    # What a line says, with labels of its series.
    text: str
    # Whether the query's value is the time of the line, in milliseconds since 1970; otherwise a line is where it has a value.
    is_time: bool = False


MARKS = [
    Mark(
        "Starts",
        "blue",
        'process_start_time_seconds{cluster=~"$cluster",node=~"$node"} * 1000'
        " and on (cluster, job, instance) larder_build_info",
        "{{node}} {{instance}} started",
        True,
    ),
    Mark(
        "Emptied actors",
        "red",
        'increase(larder_actor_restarts_total{cluster=~"$cluster",node=~"$node"}[$__rate_interval]) > 0',
        "{{node}}: a fault of Larder emptied device {{device}}",
    ),
    Mark(
        "Lost nodes",
        "orange",
        'increase(larder_coordinator_events_total{cluster=~"$cluster",event="remove"}[$__rate_interval]) > 0',
        "{{cluster}}: the coordinator removed a silent node",
    ),
    Mark(
        "Policy changes",
        "purple",
        'increase(larder_policy_changes_total{cluster=~"$cluster",node=~"$node"}[$__rate_interval]) > 0',
        "{{node}}: device {{device}} evicts by {{to}}",
    ),
]

# What operators fill in: label, and what stands there first.
TEXTS = {
    "runbooks": ("Runbooks", "https://larder.example/runbooks"),
    # Of an engine: what its GPUs cost.
    "price": ("Price of an engine, an hour", "2"),
}


@dataclass
class Dashboard:
    uid: str
    title: str
    description: str
    panels: list[Panel] = field(default_factory=list)


def dashboard_json(dashboard, all_):
    return {
        "uid": f"larder-{dashboard.uid}",
        "title": f"Larder: {dashboard.title}",
        "description": dashboard.description,
        "tags": ["larder"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "",
        "links": [
            {
                "title": other.title,
                "type": "link",
                "url": f"/d/larder-{other.uid}",
                "keepTime": True,
                "includeVars": True,
            }
            for other in all_
            if other.uid != dashboard.uid
        ],
        "annotations": {"list": [mark_json(mark) for mark in MARKS]},
        "templating": {"list": variables(dashboard)},
        "panels": list(panels(dashboard.panels)),
    }


def mark_json(mark):
    return {
        "name": mark.name,
        "datasource": SOURCE,
        "enable": True,
        "iconColor": mark.color,
        "expr": mark.query,
        "step": "15s",
        "titleFormat": mark.name,
        "textFormat": mark.text,
        "useValueForTime": mark.is_time,
    }


def variables(dashboard):
    result = [{"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}]
    for name, (label, text) in TEXTS.items():
        current = {"text": text, "value": text}
        result.append({"name": name, "label": label, "type": "textbox", "query": text, "current": current})
    for name, label, query in VARIABLES:
        result.append(
            {
                "name": name,
                "label": label,
                "type": "query",
                "datasource": SOURCE,
                "query": {"query": query, "refId": name},
                "definition": query,
                "refresh": 2,
                "sort": 1,
                "multi": True,
                "includeAll": True,
                # Also what has no such label.
                "allValue": ".*",
                "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
            }
        )
    return result


def panels(described):
    x = y = 0
    for number, panel in enumerate(described, 1):
        if x + panel.width > 24:
            x, y = 0, y + HEIGHT
        yield panel_json(panel, number, {"x": x, "y": y, "w": panel.width, "h": HEIGHT})
        x += panel.width


def panel_json(panel, number, position):
    instant = panel.kind == "table"
    result = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": OPTIONS[panel.kind],
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": SOURCE,
                "expr": expression,
                "legendFormat": legend,
                "instant": instant,
                "range": not instant,
                "format": "table" if instant else "time_series",
            }
            for i, (legend, expression) in enumerate(panel.expressions())
        ],
    }
    defaults = result["fieldConfig"]["defaults"]
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.alert:
        page = re.sub(r"(?<!^)(?=[A-Z])", "-", panel.alert).lower()
        title = f"What to do: {panel.alert}"
        result["links"] = [{"title": title, "url": f"${{runbooks}}/{page}.html", "targetBlank": True}]
    if panel.above is not None or panel.below is not None:
        edge, first, then = (panel.above, "green", "red") if panel.below is None else (panel.below, "red", "green")
        steps = [{"color": first, "value": None}, {"color": then, "value": edge}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        if panel.kind == "timeseries":
            defaults["custom"] = {"thresholdsStyle": {"mode": "dashed"}}
        elif panel.kind == "stat":
            result["options"] = OPTIONS["stat"] | {"colorMode": "value"}
    if panel.kind == "timeseries":
        defaults["custom"] = defaults.get("custom", {}) | {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 25 if panel.stacked else 5,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
    if instant:
        result["transformations"] = [
            {
                "id": "groupingToMatrix",
                "options": {"rowField": "node", "columnField": "peer", "valueField": "Value", "emptyValue": "null"},
            }
        ]
    return result


# Where the book's runbooks are served. An installation sets its own above, and runs dashboards/make.
RUNBOOKS = TEXTS["runbooks"][1]

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
HEIGHT = 8
OPTIONS = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area", "colorMode": "none"},
    "table": {"showHeader": True, "cellHeight": "sm"},
}
