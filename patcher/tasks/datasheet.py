"""The datasheet and the decontamination report of a folder of tasks, as JSON and for reading."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from patcher.runs.durable import write_whole
from patcher.tasks.known import LIKE, KnownStructures, nearest
from patcher.tasks.records import CLASS_MS, TaskCandidate, Time, load_times
from patcher.tasks.structure import GraphStructure

_BINS = (0.25, 0.5, 0.75, LIKE)


def write_sheets(
    folder: Path, header: Mapping[str, Any], candidates: list[TaskCandidate], known: KnownStructures
) -> None:
    """Write `datasheet.json`, `datasheet.md`, `decontamination.json` and `decontamination.md`."""
    kept = {each.task.op for each in candidates if each.task}
    times = {each.op: each for each in load_times(folder) if each.op in kept}
    sheet = datasheet(header, candidates, list(times.values()))
    report = decontamination(candidates, known)
    for name, document, text in (
        ("datasheet", sheet, datasheet_text(sheet)),
        ("decontamination", report, decontamination_text(report)),
    ):
        write_whole(folder / f"{name}.json", json.dumps(document, indent=1) + "\n")
        write_whole(folder / f"{name}.md", text)


def datasheet(
    header: Mapping[str, Any], candidates: list[TaskCandidate], times: list[Time]
) -> dict[str, Any]:
    """What the tasks are, and what was filtered."""
    tasks = [each.task for each in candidates if each.task]
    shapes: dict[str, Counter[str]] = {}
    for task in tasks:
        shown = " ".join("x".join(map(str, shape)) for shape in task.shapes)
        shapes.setdefault(task.layout, Counter())[shown] += 1
    return {
        "schema_version": 1,
        "created": dict(header),
        "tasks": len(tasks),
        "examined": len(candidates),
        "outcomes": _counted(each.reason for each in candidates),
        "splits": _counted(task.split for task in tasks),
        "depths": _counted(str(len(task.operators)) for task in tasks),
        "size_classes": _counted(task.size_class for task in tasks),
        "layouts": _counted(task.layout for task in tasks),
        "precisions": _counted(task.precision for task in tasks),
        "operators": _counted(name for task in tasks for name in task.operators),
        "shapes": {name: dict(found.most_common()) for name, found in shapes.items()},
        "times": {
            device: {
                "tasks": len(here),
                "inside_class": sum(each.inside for each in here),
                "median_ms": round(statistics.median(each.ms for each in here), 4),
                "smallest_ms": min(each.ms for each in here),
                "largest_ms": max(each.ms for each in here),
            }
            for device in sorted({each.device for each in times})
            for here in [[each for each in times if each.device == device]]
        },
    }


def decontamination(candidates: list[TaskCandidate], known: KnownStructures) -> dict[str, Any]:
    """How far the tasks are from benchmarks, from our ops, and the splits from each other."""
    kept = [(each.task, each.structure) for each in candidates if each.task and each.structure]
    tasks = {task.op: structure for task, structure in kept}
    train = {task.op: structure for task, structure in kept if task.split == "train"}
    held = {task.op: structure for task, structure in kept if task.split == "held-out"}
    excluded = [
        {"candidate": each.index, "reason": each.reason, "detail": each.detail}
        for each in candidates
        if each.reason in ("like a benchmark's", "like an op of the library")
    ]
    return {
        "schema_version": 1,
        "method": "graphs after PyTorch's core decompositions, without shapes, numbers and moves; "
        f"excluded: the same digest, or Jaccard similarity of operators and edges from {LIKE}",
        "against": {"compared": len(known.against), **_distances(tasks, known.against)},
        "library": {"compared": len(known.library), **_distances(tasks, known.library)},
        "untraced": known.untraced,
        "excluded": excluded,
        "duplicates": sum(each.reason == "duplicate" for each in candidates),
        "splits": {
            "train": len(train),
            "held-out": len(held),
            "structures_in_both": len(_digests(train) & _digests(held)),
            "operator_sets_in_both": len(_families(train) & _families(held)),
            **_distances(held, train),
        },
    }


def _distances(
    tasks: dict[str, GraphStructure], among: dict[str, GraphStructure]
) -> dict[str, Any]:
    """Of each task to the nearest: a histogram, and the ten nearest."""
    found = {name: nearest(structure, among) for name, structure in tasks.items()}
    ranked = sorted(found.items(), key=lambda each: -each[1][1])[:10] if among else []
    names = [f"under {edge}" for edge in _BINS] + [f"{LIKE} or more"]
    places = Counter(names[sum(far >= edge for edge in _BINS)] for _, far in found.values())
    return {
        "likeness_of_nearest": {name: places[name] for name in names},
        "nearest": [
            {"task": task, "to": name, "likeness": round(far, 3)} for task, (name, far) in ranked
        ],
    }


def _digests(tasks: dict[str, GraphStructure]) -> set[str]:
    return {each.digest for each in tasks.values()}


def _families(tasks: dict[str, GraphStructure]) -> set[str]:
    return {each.family for each in tasks.values()}


def _counted(items: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(items).items(), key=lambda each: (-each[1], each[0])))


def datasheet_text(sheet: dict[str, Any]) -> str:
    """For reading."""
    created, tasks, examined = sheet["created"], sheet["tasks"], sheet["examined"]
    share = 100 * tasks / examined if examined else 0.0
    versions = ", ".join(f"{name} {number}" for name, number in created["versions"].items())
    compiled = "ran compiled, too"
    if not created["compiled"]:
        why = "no compiler was found" if created["compile_asked"] else "that was not asked for"
        compiled = f"were not compiled: {why}"
    lines = [
        "# Datasheet",
        "",
        f"{tasks} tasks of seed {created['seed']} for {created['device']}: {share:.0f} % of "
        f"{examined} candidates. Made with {versions}. Modules {compiled}.",
        "",
        "Each task is composed of one to five operators of PyTorch, with random weights and inputs;"
        " no person and no language model wrote them. `problems/` has their modules, `ops/` their "
        "contracts, references, regimes and baselines.",
    ]
    for title, key, whole in (
        ("What became of candidates", "outcomes", examined),
        ("Splits", "splits", tasks),
        ("Operators in a task", "depths", tasks),
        ("Size classes", "size_classes", tasks),
        ("Layouts of the first input", "layouts", tasks),
        ("Precision", "precisions", tasks),
        ("Operators, by tasks' uses", "operators", 0),
    ):
        lines += ["", f"## {title}", "", *_table(sheet[key], whole)]
    lines += ["", "## Most frequent shapes of inputs", ""]
    for layout, shapes in sheet["shapes"].items():
        most = ", ".join(f"{shape} ({count})" for shape, count in list(shapes.items())[:8])
        lines.append(f"- {layout}: {most}")
    lines += ["", "## Measured times of eager", ""]
    bounds = "; ".join(f"{name}: {low:g} to {high:g} ms" for name, (low, high) in CLASS_MS.items())
    for device, found in sheet["times"].items():
        lines.append(
            f"- {device}: median {found['median_ms']:.2f} ms, {found['smallest_ms']:.3f} to "
            f"{found['largest_ms']:.1f} ms; {found['inside_class']} of {found['tasks']} inside "
            f"their class ({bounds})"
        )
    return "\n".join(lines) + "\n"


def _table(counts: dict[str, int], whole: int) -> list[str]:
    rows = ["| | number |" + (" share |" if whole else ""), "|---|---|" + ("---|" if whole else "")]
    return rows + [
        f"| {name} | {count} |" + (f" {100 * count / whole:.1f} % |" if whole else "")
        for name, count in counts.items()
    ]


def decontamination_text(report: dict[str, Any]) -> str:
    """For reading."""
    splits = report["splits"]
    lines = [
        "# Decontamination",
        "",
        f"Compared: {report['method']}.",
        "",
        f"- problems of benchmarks: {report['against']['compared']}",
        f"- ops of the library: {report['library']['compared']}",
        f"- candidates excluded for likeness: {len(report['excluded'])}; as duplicates: "
        f"{report['duplicates']}",
        f"- train {splits['train']}, held-out {splits['held-out']}; structures in both: "
        f"{splits['structures_in_both']}; sets of operators in both: "
        f"{splits['operator_sets_in_both']}",
    ]
    for title, found in (
        ("Tasks to the nearest problem of a benchmark", report["against"]),
        ("Tasks to the nearest op of the library", report["library"]),
        ("Held-out tasks to the nearest for training", splits),
    ):
        lines += ["", f"## {title}", "", *_table(found["likeness_of_nearest"], 0), ""]
        lines += [
            f"- {each['likeness']:.2f} {each['task']}: {each['to']}" for each in found["nearest"]
        ]
    if report["untraced"]:
        lines += ["", "## Not compared", ""]
        lines += [f"- {name}: {why}" for name, why in report["untraced"].items()]
    return "\n".join(lines) + "\n"
