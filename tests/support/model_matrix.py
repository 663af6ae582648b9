"""Which role of which model is proven on which engine: `make models` writes the page.

In transformers a small model of each architecture is built, each patch point is installed in it,
and a step is decoded. Of vLLM the same is in a file, which `make vllm-models` writes. Of GPUs the
page has what the committed runs measured.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tiny_models import KINDS, MORE, WHOLE, model_of
from transformers_sample import inside, original_kernel
from vllm_matrix import known, weights_of

from patcher.bench import VerificationError, Workload, content, load_op, presets
from patcher.bench.engines import open_engine
from patcher.integrate.transformers.points import POINTS
from patcher.integrate.vllm.points import POINTS as IN_VLLM

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/models.md"
RESULTS = ROOT / "bench/results"
_HEAD = """# Models, roles and engines

`make models` writes this page. A filled cell was proven, by a test or by a run whose samples are
committed. An empty one has no such layer, or was not tried. What a config.json alone tells of
vLLM's models is on [its page](vllm.md); `patcher verify PATCH --model M` asks about one model.

## transformers, by tests

A small model of each architecture, with random weights, on a CPU. A number says how many calls of
a decode step the kernel of that patch point took; *of*, out of how many, where the others fell
back. Architectures in bold go through profile, run with a recorded loop, patch, A/B and revert in
`tests/patcher/test_any_model_whole.py`.
"""
_VLLM = """
## vLLM {version}, by tests

The same numbers for small models that vLLM builds by its own classes from a config.json, on a CPU
(`make vllm-models`; `make engines` holds the table to it). Layers, routing, compilation in pieces,
the metadata of a step and the sampler of model runner V1 are vLLM's own; doubles in PyTorch stand
for kernels that need a GPU, and the graph is run without Inductor. Each step gave, within some
roundings, what it gave without the patch. No GPU ran here: that is in the next table.

A row is of weights in float32, or as the words beside its name say, in bfloat16. In fp8 the passes
`fuse_norm_quant` and `fuse_act_quant` need a GPU and are off; points that they exclude are empty
there. That a place in Triton's own library is the one that was read is for other tests to say.
No row has layers of `{left}`, or it needs the step of a model runner.
"""
_RUNS = """## On GPUs, by runs

Patches that took calls in a verdict of `bench/results`, alone or as one of several.
"""


def decoded(kind: str, folder: Path) -> dict[str, str]:
    """By patch point: the calls that its kernel took in a decode step of a small model."""
    model = model_of(folder / kind, kind, **{**KINDS, **MORE}[kind])
    size = {"batch": 2, "input_len": 8, "output_len": 4, "threads": 1}
    engine = open_engine(
        Workload(model=model, device="cpu", dtype="float32", **size)  # type: ignore[arg-type]
    )
    found = {}
    decoding = engine.prefill(engine.prompts(1))
    for name, kind_of_point in POINTS.items():
        point = kind_of_point(engine.model)
        try:
            point.find()
        except VerificationError:
            continue
        with inside(point, original_kernel(name, bounded=True)) as book:
            engine.decode(decoding, 1)
        taken, left = sum(book.calls.values()), sum(book.reasons.values())
        if taken:
            found[name] = f"{taken} of {taken + left}" if left else str(taken)
    engine.close()
    return found


def survey() -> dict[str, dict[str, str]]:
    """`decoded` of every architecture."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return {kind: decoded(kind, Path(folder)) for kind in sorted({**KINDS, **MORE})}
    finally:
        torch.set_num_threads(threads)


def runs() -> dict[tuple[str, ...], list[str]]:
    """By model, engine, device, role and op: the verdicts on patches of it, with their files."""
    found: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for file in sorted(RESULTS.glob("**/*.json.xz")):
        for one in _verdicts(json.loads(content(file))):
            engine = one.workload["engine"]
            if engine not in one.environment["packages"]:
                continue  # a build for a CPU, which goes by another name
            size = "alone" if len(one.calls) == 1 else f"one of {len(one.calls)}"
            for patch, calls in one.calls.items():
                if not calls:
                    continue
                op = load_op(patch.split("-")[0])
                points = (each for each in op.contract.patch_points if each.engine == engine)
                key = (
                    one.workload["model"],
                    f"{engine} {one.environment['packages'][engine]}",
                    one.environment["device"].removeprefix("NVIDIA "),
                    f"`{next(points).point}`",
                    f"`{op.name}`",
                )
                found[key].append(f"[{size}{one.how}: {one.verdict}]({_link(file)})")
    return found


@dataclass(frozen=True)
class _Verdict:
    """A whole verdict, with the calls by patch."""

    workload: dict[str, Any]
    environment: dict[str, Any]
    verdict: str
    calls: dict[str, Any]
    how: str = ""


def _verdicts(found: Any) -> Iterator[_Verdict]:
    """The whole verdicts in a file of results; most other files hold none."""
    for each in found if isinstance(found, list) else [found]:
        if not isinstance(each, dict):
            continue
        if "measured" in each and ({"decision", "decisions"} & each.keys()):
            measured = each["measured"]
            ours = measured if isinstance(measured, list) else [measured]
            timed = ours[0]["throughput"]
            decision = (each.get("decisions") or [each.get("decision")])[0]
            calls = {one["receipt"]["patch_id"]: one["receipt"]["calls"] for one in ours}
            yield _Verdict(timed["workload"], timed["environment"], decision["verdict"], calls)
        elif {"header", "processes", "comparison"} <= each.keys():
            receipts = [one for process in each["processes"] for one in process["receipts"]]
            yield _Verdict(
                each["header"]["workload"],
                each["environment"],
                each["comparison"]["verdict"],
                {one["patch_id"]: one["calls"] for one in receipts},
                " served",
            )


def _link(file: Path) -> str:
    return f"https://github.com/patcher-ai/patcher/blob/main/{file.relative_to(ROOT).as_posix()}"


def page() -> str:
    """The page as Markdown."""
    rows = [
        (f"**`{kind}`**" if kind in WHOLE else f"`{kind}`", _presets(kind), found)
        for kind, found in survey().items()
    ]
    lines = [_HEAD, *_table(rows, POINTS)]
    calls = known()["calls"]
    tried = [name for name in IN_VLLM if any(name in found for found in calls.values())]
    left = "`, `".join(name for name in IN_VLLM if name not in tried)
    served = [
        (" ".join((f"`{kind}`", *more)), _presets(kind, " ".join(more)), found)
        for (kind, *more), found in ((name.split(), found) for name, found in calls.items())
    ]
    lines += [_VLLM.format(version=known()["vllm"], left=left), *_table(served, tried)]
    heads = ["model", "engine", "device", "role", "op", "verdicts"]
    lines += ["", _RUNS, _row(heads), _row(["---"] * len(heads))]
    lines += [_row([*key, "; ".join(dict.fromkeys(said))]) for key, said in sorted(runs().items())]
    return "\n".join([*lines, ""])


def _table(rows: Iterable[tuple[str, str, dict[str, str]]], points: Iterable[str]) -> Iterator[str]:
    """Rows of an architecture, its presets, and what it has by patch point."""
    shown = list(points)
    yield _row(["architecture", "presets", *(f"`{name}`" for name in shown)])
    yield _row(["---"] * (len(shown) + 2))
    for title, named, found in rows:
        yield _row([title, named, *(found.get(name, "") for name in shown)])


def _presets(kind: str, weights: str | None = None) -> str:
    """Those of an architecture; with `weights`, those published so."""
    return ", ".join(
        name
        for name, one in presets().items()
        if one.architecture in _names(kind)
        and (weights is None or weights == weights_of(one.published))
    )


def _names(kind: str) -> tuple[str, ...]:
    """An architecture's own name, and that of the multimodal model around it."""
    return kind, kind.removesuffix("_text")


def _row(cells: Any) -> str:
    return " ".join(["|", *(f"{each} |" if each else "|" for each in cells)])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
