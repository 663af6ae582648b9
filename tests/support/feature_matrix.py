"""What each patch point did with each feature of an engine, by the tests that say so.

A test carries `feature(name, outcome, *points)` and asserts that outcome. As a pytest plugin
(`-p feature_matrix`) this module records what passed against the engine that is there, in the place
of all that was recorded of that version, and writes the page. `make features` runs all of it.
"""

from __future__ import annotations

import importlib.metadata
import json
import lzma
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from patcher.integrate.transformers.points import POINTS as TRANSFORMERS
from patcher.integrate.vllm.points import POINTS as VLLM

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "data" / "features.json.xz"
PAGE = ROOT / "docs" / "reference" / "features.md"
ANY, NOT_TRIED = "any", "not tried"
"""The point of features that are the same at every point, and what no passed test says."""
OUTCOMES = ("right", "refused", "falls back")
ENGINES: Mapping[str, tuple[str, ...]] = {
    "vllm": tuple(VLLM),
    "transformers": tuple(TRANSFORMERS),
    "torch": (ANY,),
}
TITLES = {"vllm": "vLLM", "transformers": "transformers", "torch": "Processes of any engine"}
ON_GPU = ROOT / "bench" / "results" / "h100-vllm-0.33" / "features.json.xz"
"""What `patcher.bench.lab.vllm_features` found on a GPU."""
NEEDS_GPU = (
    "CUDA graphs: FULL_DECODE_ONLY, breakable",
    "draft models under load",
    "NIXL and other connectors that write while a step runs",
    "tensor parallelism and EPLB on several GPUs",
)
"""What was not tried at any point, since only a GPU, or several, tell."""

Claim = tuple[str, str, str, str]
"""Engine, feature, point, outcome."""
Record = dict[str, dict[str, dict[str, dict[str, list[str]]]]]
"""Versions by engine, feature, point and outcome."""


def feature(name: str, outcome: str, *points: str) -> pytest.MarkDecorator:
    """Mark a test, or a case of one, that asserts what comes of a feature at patch points.

    Args:
        name: what people switch on, or do to a model.
        outcome: one of `OUTCOMES`: the kernel runs, and the result is the engine's; the patch is
            not installed, in words; the engine's own code runs, and that is counted.
        points: names of points, all of one engine; `ANY` if it is the same at every point.
    """
    assert outcome in OUTCOMES, outcome
    assert points, name
    return pytest.mark.feature(name, outcome, points)


def claims_of(item: pytest.Item) -> Iterator[Claim]:
    """What a test asserts."""
    for mark in item.iter_markers("feature"):
        name, outcome, points = mark.args
        having = [engine for engine, known in ENGINES.items() if set(points) <= set(known)]
        # engines may have points of one name: then the test lies in the folder of its own
        [engine] = having if len(having) == 1 else [e for e in having if e in item.path.parts]
        for point in points:
            yield engine, name, point, outcome


def page(record: Record) -> str:
    """The page as Markdown."""
    lines = [_HEAD]
    for engine, points in ENGINES.items():
        found = record.get(engine, {})
        versions = _sorted({v for version in _versions(found) for v in version})
        lines += [f"## {TITLES[engine]}", "", f"Run with {engine} {', '.join(versions)}.", ""]
        names = ["outcome"] if points == (ANY,) else [f"`{point}`" for point in points]
        lines += [_row(["feature", *names]), _row(["---"] * (len(names) + 1))]
        for name in sorted(found, key=lambda name: name.strip("`").lower()):
            cells = [_cell(found[name].get(point, {}), versions) for point in points]
            lines.append(_row([name, *cells]))
        lines.append("")
    lines += [_GPU, *_on_gpu(json.loads(lzma.decompress(ON_GPU.read_bytes()))), ""]
    lines.append(_PASSES)
    lines += [f"- `{p.name}`: {_code(p.fusions)}" for p in VLLM.values() if p.fusions]
    return "\n".join([*lines, "", _TAIL, *(f"- {name}" for name in NEEDS_GPU), ""])


def _on_gpu(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A row a feature, with the patches that left all calls to the engine, and why."""
    yield _row(["feature", "outcome", "idle patches"])
    yield _row(["---"] * 3)
    for name, each in sorted(found.items()):
        idle: dict[str, list[str]] = {}
        for patch, told in each["patches"].items():
            if "; 0 calls;" in told:
                layers, _, fell = told.partition("; 0 calls; fell back ")
                # by layers that refused, else by the first reason of a call
                layers = layers.removeprefix("falls back; ")
                if "layers" in layers:
                    layers = layers.partition("; ")[2]
                reason = (layers or fell).partition(";")[0]
                reason = re.sub(r"^\d+: ", "", reason)
                if reason == "never":
                    reason = "no layer of this model is for them"
                idle.setdefault(reason, []).append(patch.split("-")[0])
        said = "; ".join(f"{_code(ops)}: {why}" for why, ops in idle.items())
        outcome = each["outcome"]
        if outcome == NOT_TRIED:
            outcome = each["why"]
        elif outcome == "stock is wrong":
            outcome += f": {each['why']}"
        yield _row([name, outcome, said or "none"])


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _versions(found: Mapping[str, Mapping[str, Mapping[str, list[str]]]]) -> Iterator[list[str]]:
    for points in found.values():
        for outcomes in points.values():
            yield from outcomes.values()


def _sorted(versions: Iterable[str]) -> list[str]:
    from packaging.version import Version

    return sorted(versions, key=Version)


def _cell(outcomes: Mapping[str, list[str]], versions: list[str]) -> str:
    if not outcomes:
        return ""
    left = [version for version in versions if not any(version in v for v in outcomes.values())]
    if len(outcomes) == 1:
        said = list(outcomes)
    else:
        said = [f"{outcome} in {', '.join(v)}" for outcome, v in outcomes.items()]
    return "; ".join([*said, *([f"{NOT_TRIED} in {', '.join(left)}"] if left else [])])


def _row(cells: Iterable[str]) -> str:
    return " ".join(["|", *(f"{each} |" if each else "|" for each in cells)])


def recorded() -> Record:
    """What was recorded."""
    known: Record = json.loads(lzma.decompress(RECORD.read_bytes()))
    return known


def _text(record: Record) -> str:
    """The record as JSON, a feature a line."""
    engines = []
    for engine, names in record.items():
        lines = [f"  {json.dumps(name)}: {json.dumps(points)}" for name, points in names.items()]
        engines.append(f" {json.dumps(engine)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(engines) + "\n}\n"


def _add(record: Record, engine: str, version: str, passed: Iterable[Claim]) -> None:
    """Put what passed in the place of what was recorded of a version."""
    for points in record.setdefault(engine, {}).values():
        for outcomes in points.values():
            for outcome, versions in list(outcomes.items()):
                outcomes[outcome] = [each for each in versions if each != version]
    for _, name, point, outcome in passed:
        versions = record[engine].setdefault(name, {}).setdefault(point, {}).get(outcome, [])
        record[engine][name][point][outcome] = _sorted({*versions, version})
    record[engine] = {
        name: kept
        for name, points in sorted(record[engine].items())
        if (
            kept := {
                point: said
                for point, outcomes in sorted(points.items())
                if (said := {o: v for o, v in sorted(outcomes.items()) if v})
            }
        )
    }


class _Run:
    """Collects outcomes of tests, and writes them at the end."""

    def __init__(self) -> None:
        self.claims: set[Claim] = set()
        self.passed: set[Claim] = set()
        self.failed: set[Claim] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.claims = {claim for item in session.items for claim in claims_of(item)}
        outcomes = {claim[:3] for claim in self.claims}
        if len(outcomes) != len(self.claims):
            raise pytest.UsageError("two tests claim different outcomes of one feature")
        if session.config.option.collectonly:
            writer = session.config.get_terminal_writer()
            for claim in sorted(self.claims):
                writer.line(f"claim {json.dumps(claim)}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Any:
        report = yield
        if report.failed:
            self.failed.update(claims_of(item))
        elif report.passed and report.when == "call":
            self.passed.update(claims_of(item))
        return report

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.config.option.collectonly:
            return
        record = recorded()
        for engine in {claim[0] for claim in self.claims}:
            said = {claim for claim in self.passed - self.failed if claim[0] == engine}
            if said:
                _add(record, engine, _version(engine), said)
        RECORD.write_bytes(lzma.compress(_text(record).encode()))
        PAGE.write_text(page(record))


def _version(engine: str) -> str:
    from packaging.version import Version

    return Version(importlib.metadata.version(engine)).public


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Run())


_HEAD = """# Features and patch points

`make features` writes this page from tests that ran against each version, on a CPU: vLLM's Python
from its wheels, with doubles for what needs a GPU; transformers with real peft and accelerate.

- *right*: the patched kernel runs where it can, and what comes out is what the engine gives.
- *falls back*: the engine's own code runs, and the receipt counts that with a reason.
- *refused*: the patch is not installed where that is on, and the log says why.
- An empty cell, or *not tried*: no test says. `patcher receipts` tells for each layer and call.
"""
_GPU = """\
## vLLM 0.33.0 on an H100

Two layers of gpt-oss-20b with eight patches, stock and patched in processes of their own: logits
over the same tokens, or greedy tokens where a step has several rows of a request
([evidence](https://github.com/patcher-ai/patcher/blob/main/bench/results/h100-vllm-0.33/README.md)).
An idle patch left all its calls to the engine.
"""
_PASSES = """## Passes that lose what a patch replaces

A pass of vLLM's compiler finds vLLM's own operators, and no patched kernel. Where one of these is
on, the log names it when the patch goes in: what it would have fused is not in the verdict.
"""
_TAIL = """## Not tried at any point

Only a GPU, or several, can tell:
"""
