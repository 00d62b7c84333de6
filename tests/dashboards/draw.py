"""Draws panels from the answers to their queries: one picture for each dashboard.

    draw.py DATA FOLDER
"""

import json
import math
import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter

COLUMNS = 4
PREFIXES = [(1e9, "G"), (1e6, "M"), (1e3, "k")]
BINARY = [(2**30, "Gi"), (2**20, "Mi"), (2**10, "Ki")]


def main():
    data, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    folder.mkdir(exist_ok=True)
    for dashboard in dict.fromkeys(one["dashboard"] for one in data):
        panels = [one for one in data if one["dashboard"] == dashboard]
        path = folder / f"{dashboard}.png"
        draw(panels, path)
        print(f"drawn: {path.name}, {len(panels)} panels, {path.stat().st_size // 1024} KiB")


def draw(panels, path):
    rows = math.ceil(len(panels) / COLUMNS)
    figure, axes = plt.subplots(rows, COLUMNS, figsize=(19, 3.3 * rows), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    started = min(
        float(series["values"][0][0]) for one in panels for answer in one["answers"].values() for series in answer
    )
    for one, axis in zip(panels, axes.flat):
        panel = one["panel"]
        axis.set_title(panel["title"], fontsize=9, loc="left", fontweight="bold")
        axis.tick_params(labelsize=7)
        kind = {"stat": stat, "table": matrix}.get(panel["type"], lines)
        kind(axis, panel, one["answers"], started)
    figure.tight_layout(h_pad=1.5)
    # Few colors suffice, and make small files.
    figure.savefig(path, dpi=68, pil_kwargs={"optimize": True})
    plt.close(figure)


def points(series, started):
    pairs = [(float(at) - started, float(value)) for at, value in series["values"]]
    return [pair for pair in pairs if not math.isnan(pair[1])]


def lines(axis, panel, answers, started):
    unit, stacked = panel["fieldConfig"]["defaults"]["unit"], []
    is_stacked = panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
    for legend, answer in answers.items():
        for series in answer:
            xy = points(series, started)
            name = re.sub(r"\{\{(\w+)\}\}", lambda found: series["metric"].get(found[1], ""), legend)
            if is_stacked:
                stacked.append((name, dict(xy)))
            else:
                axis.plot(*zip(*xy), label=name, linewidth=1) if xy else None
    if stacked:
        times = sorted(set.intersection(*(set(values) for _, values in stacked)))
        axis.stackplot(times, [[values[at] for at in times] for _, values in stacked], labels=[n for n, _ in stacked])
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: written(value, unit)))
    most = panel["fieldConfig"]["defaults"].get("max")
    axis.set_ylim(bottom=0, top=most and most * 1.05)
    axis.grid(alpha=0.25)
    if len(axis.get_legend_handles_labels()[0]) <= 10:
        axis.legend(fontsize=6, loc="upper left", framealpha=0.6)


def stat(axis, panel, answers, started):
    axis.axis("off")
    (answer,) = answers.values()
    values = points(answer[0], started)
    text = written(values[-1][1], panel["fieldConfig"]["defaults"]["unit"])
    axis.text(0.5, 0.45, text, fontsize=30, ha="center", va="center", transform=axis.transAxes)


def matrix(axis, panel, answers, started):
    axis.axis("off")
    (answer,) = answers.values()
    unit = panel["fieldConfig"]["defaults"]["unit"]
    last = {(s["metric"]["node"], s["metric"]["peer"]): busiest(points(s, started)) for s in answer}
    rows, columns = sorted({row for row, _ in last}), sorted({column for _, column in last})
    cells = [[written(last[row, column], unit) if (row, column) in last else "" for column in columns] for row in rows]
    table = axis.table(cellText=cells, rowLabels=rows, colLabels=columns, loc="center", bbox=[0.15, 0.2, 0.85, 0.6])
    table.auto_set_font_size(False)
    table.set_fontsize(8)


def busiest(values):
    """A value from a time with work: the replay has ended when the last value is taken."""
    return sorted(value for _, value in values)[len(values) * 3 // 4] if values else 0.0


def written(value, unit):
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "s":
        for factor, name in [(1, "s"), (1e-3, "ms"), (1e-6, "µs")]:
            if abs(value) >= factor:
                return f"{value / factor:.3g} {name}"
        return "0"
    ending = {"bytes": "B", "Bps": "B/s", "reqps": "/s"}.get(unit, "")
    for factor, prefix in BINARY if unit in ("bytes", "Bps") else PREFIXES:
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{ending}"
    return f"{value:.3g} {ending}".strip()


main()
