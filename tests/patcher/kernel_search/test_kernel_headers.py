"""Every kernel that ships begins with a header, and what the header says is so."""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from patch_sample import evaluation

from patcher import pipeline
from patcher.bench import Candidate, Language, Op, content, load_op, load_ops
from patcher.bench.ops.header import (
    FIELDS,
    PROVENANCE,
    arguments,
    comment_mark,
    header_form,
    header_hint,
    missing_fields,
    read_header,
    split_header,
    wrapped,
    written,
)
from patcher.bench.ops.op import SolutionInfo
from patcher.cli import main
from patcher.kernel_search.recording import LoopRecording, read
from patcher.kernel_search.recording_archive import recordings
from patcher.prompting.rendering import Prompts

ROOT = Path(__file__).resolve().parents[3]
LOOPS = ROOT / "bench/results/loop/recordings.tar.xz"
SHIPPED = {
    f"{op.name}/{info.name}": (op, info, op.folder / "solutions" / info.name / one.file_name)
    for op in load_ops().values()
    for info, one in op.solutions()
}
MEASURED = "fused_add_rms_norm/cuda_tuned"
RUN = re.compile(r"the agent loop, recording bench/results/loop/([\w-]+), candidate (\d+)[.,]")
NOT_RECORDED = re.compile(
    r"the agent loop, run (\d{8}-\d{6}-optimize-[0-9a-f]{4}), candidate \d+, answered from its "
    r"prompt alone; not recorded\."
)
PLACE = re.compile(r"(.+?), geometric means, (bench/results/[\w-]+): ")
FIGURE = re.compile(
    r"sweep ([\w-]+) ([\d.]+)x against ([\w.+]+), ([\d.]+)x to ([\d.]+)x at (\w+) (\d+) to (\d+) "
    r"\(([\w.-]+\.json(?:\.xz)?)\)"
)


def problems(text: str, op: Op, info: SolutionInfo) -> list[str]:
    """What is wrong with a shipped source's header, against contract, recordings and verdicts."""
    mark = comment_mark(info.language.in_python)
    found = read_header(text, mark)
    wrong = [name for name in FIELDS + PROVENANCE if not found.get(name)]
    if wrong:
        return [f"{name}: lacking" for name in wrong]
    if list(found) != [*FIELDS, *PROVENANCE]:
        wrong.append("order")
    stated = split_header(text, mark)
    if stated is None:
        return [*wrong, "Digest: not the last line, or no empty line after it"]
    digest, below = stated
    if Candidate(op=op.name, language=info.language, source=below).digest != digest:
        wrong.append("Digest: of another source")
    head = text.removesuffix(below).rstrip("\n").split("\n")
    if not 8 <= len(head) <= 20 or max(map(len, head)) > 100:
        wrong.append("size")
    if not found["Op"].startswith(f"{op.name}: "):
        wrong.append("Op")
    if found["Arguments"] != arguments(op.contract):
        wrong.append("Arguments")
    if found["Writes"] != ", ".join(written(op.contract)):
        wrong.append("Writes")
    if NOT_RECORDED.match(found["Made by"]) and not PLACE.match(found["Figures"]):
        wrong.append("Figures: neither recording nor verdict")
    return [*wrong, *_run_problems(found["Made by"], info, digest), *_figures(found, digest)]


@functools.cache
def recorded() -> dict[str, LoopRecording]:
    with recordings(LOOPS) as folders:
        return {folder.name: read(folder) for folder in folders}


def _run_problems(made_by: str, info: SolutionInfo, digest: str) -> list[str]:
    if info.origin == "hand":
        return [] if made_by.startswith("hand") else ["Made by: solution.toml says hand"]
    if bare := NOT_RECORDED.fullmatch(made_by):
        # a loop that is not over; the verdict in `Figures` is all that there is of it
        return [] if info.origin == f"loop {bare[1]}" else ["Made by: another run in solution.toml"]
    run = RUN.match(made_by)
    if run is None or info.origin != f"loop {run[1]}" or run[1] not in recorded():
        return ["Made by: no such recording"]
    won = recorded()[run[1]].optimisation
    if (won.best_digest, won.best_iteration) != (digest, int(run[2])):
        return ["Made by: another candidate won that run"]
    return []


def _figures(found: dict[str, str], digest: str) -> list[str]:
    """Figures that a verdict on this source does not have, and verdicts that are left out."""
    told = found["Figures"]
    of_it = {
        file for file in (ROOT / "bench/results/kernels").glob("*.json.xz") if digest in _text(file)
    }
    place = PLACE.match(told)
    if place is None:
        if of_it or not told.startswith("not measured"):
            return ["Figures: neither `not measured` nor of a verdict"]
        return []
    seen, wrong = set(), []
    for sweep, geomean, baseline, low, high, axis, first, last, name in FIGURE.findall(told):
        file = ROOT / place[2] / name
        if not file.is_file():
            wrong.append(f"Figures: {name} does not exist")
            continue
        seen.add(file)
        verdict: dict[str, Any] = json.loads(_text(file))
        speedups = sorted(timing["speedup"] for timing in verdict["timings"])
        sizes = [timing["axes"][axis] for timing in verdict["timings"]]
        same = (
            verdict["digest"] == digest
            and verdict["environment"]["device"] == place[1]
            and verdict.get(
                "sweep", name.removesuffix(".xz").removesuffix(".json").split("-", 2)[-1]
            )
            == sweep
            and verdict["baseline"] == baseline
            and sizes[0] == int(first)
            and sizes[-1] == int(last)
            and abs(verdict["geomean_speedup"] - float(geomean)) <= 0.0051
            and abs(speedups[0] - float(low)) <= 0.0051
            and abs(speedups[-1] - float(high)) <= 0.0051
        )
        if not same:
            wrong.append(f"Figures: {name} says otherwise")
    if not seen or not of_it <= seen:
        wrong.append("Figures: a verdict is left out")
    return wrong


def _text(file: Path) -> str:
    return content(file).decode()


@pytest.mark.parametrize("name", SHIPPED)
def test_a_kernel_that_ships_begins_with_a_true_header(name: str) -> None:
    op, info, path = SHIPPED[name]
    assert problems(_text(path), op, info) == []


def test_every_language_of_the_library_is_there() -> None:
    languages = {info.language for _, info, _ in SHIPPED.values()}
    shipped = {Language.CPP, Language.CUDA, Language.PTX, Language.TRITON, Language.TORCH}
    assert languages == shipped


@pytest.mark.parametrize("field", FIELDS + PROVENANCE)
@pytest.mark.parametrize("name", [MEASURED, "rope/cpu_torch"])
def test_a_field_that_is_lacking_or_empty_is_found(name: str, field: str) -> None:
    op, info, path = SHIPPED[name]
    text, mark = _text(path), comment_mark(info.language.in_python)
    lines = wrapped(field, read_header(text, mark)[field], mark)
    assert "\n".join(lines) in text
    for left in ("", f"{mark} {field}:\n"):
        cut = text.replace("\n".join(lines) + "\n", left, 1)
        assert f"{field}: lacking" in problems(cut, op, info)
        assert (field in missing_fields(cut, mark)) == (field in FIELDS)


@pytest.mark.parametrize(
    ("told", "instead", "said"),
    [
        ("1.26x against", "1.27x against", "says otherwise"),
        ("against vllm", "against eager", "says otherwise"),
        ("1.46x at", "1.48x at", "says otherwise"),
        ("tokens 1 to 128", "tokens 1 to 64", "says otherwise"),
        ("NVIDIA H200", "NVIDIA H100", "says otherwise"),
        ("norm-cuda_tuned.json.xz", "norm-other.json.xz", "does not exist"),
        ("candidate 0", "candidate 1", "another candidate won that run"),
        ("loop/fused_add_rms_norm-cuda-4", "loop/fused_add_rms_norm-cuda-9", "no such recording"),
        ("// Writes: input, residual", "// Writes: input", "Writes"),
        ("input[T: tokens, hidden], res", "input[T: tokens], res", "Arguments"),
        ("#include <cuda_bf16.h>\n", "", "Digest: of another source"),
    ],
)
def test_what_is_not_so_is_found(told: str, instead: str, said: str) -> None:
    op, info, path = SHIPPED[MEASURED]
    assert told in _text(path)
    [wrong] = problems(_text(path).replace(told, instead), op, info)[:1]
    assert said in wrong


def test_a_verdict_must_not_be_left_out() -> None:
    op, info, path = SHIPPED[MEASURED]
    mark = comment_mark(info.language.in_python)
    figures = wrapped("Figures", read_header(_text(path), mark)["Figures"], mark)
    text = _text(path).replace("\n".join(figures), f"{mark} Figures: not measured.")
    assert problems(text, op, info) == ["Figures: neither `not measured` nor of a verdict"]


def test_a_file_is_read_without_its_header_as_long_as_that_is_its_own(tmp_path: Path) -> None:
    op, _, path = SHIPPED[MEASURED]
    digest, below = split_header(_text(path), "//") or ("", "")
    assert Candidate.from_file(op.name, path).source == below
    assert Candidate.from_file(op.name, path).digest == digest
    for changed in (
        f"{_text(path)}// another line\n",  # another kernel
        _text(path).replace("\n\n#include", "\n#include", 1),
        _text(path).replace(digest, digest[:-1]),
        f"\n{_text(path)}",
        f"// Op: nothing\n{below}",
    ):
        file = tmp_path / path.name
        file.write_text(changed, encoding="utf-8")
        assert Candidate.from_file(op.name, file).source == changed
    assert split_header(_text(path), "#") is None
    assert split_header(f"// Digest: {digest}", "//") is None


@pytest.mark.parametrize("language", list(Language))
def test_each_question_for_a_kernel_asks_for_a_header(language: Language) -> None:
    op = load_op("fused_add_rms_norm")
    form = header_form(op.contract, comment_mark(language.in_python))
    assert missing_fields(form, comment_mark(language.in_python)) == []
    prompts = Prompts(op, language, "one device", op.sweep("cpu"))
    [timing] = evaluation().timings
    sized = timing.model_copy(update={"axes": {"tokens": 1, "hidden": 256}})
    verdict = evaluation().model_copy(update={"timings": (sized,)})
    for text in (
        prompts.generate(None),
        prompts.repair("source", verdict, None),
        prompts.optimize("source", verdict, None, (), None),
        prompts.combine([("source", verdict)], (), None),
    ):
        assert form in text
    assert form not in prompts.analyse("source", verdict, ())


def test_a_bundle_of_a_source_without_a_header_comes_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    op, _, path = SHIPPED["fused_add_rms_norm/cpu_simd"]
    candidate = Candidate.from_file(op.name, path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    Path("bare.cpp").write_text(candidate.source)
    Path("whole.cpp").write_text(_text(path))
    Path("verdict.json").write_text(evaluation(candidate).model_dump_json())

    said = []
    for name in ("bare", "whole"):
        words = ("bundle", op.name, f"{name}.cpp", name, "--evaluation", "verdict.json")
        monkeypatch.setattr(sys, "argv", ["patcher", *words])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 0
        said.append(capsys.readouterr().err)
    lacking = "does not begin with a header that says Op, Arguments, Writes, Needs, Idea"
    assert lacking in said[0]
    assert "hint" not in said[1]
    assert header_hint(_text(path), "//") is None


def test_a_run_says_that_its_winner_has_no_header(tmp_path: Path) -> None:
    form = header_form(load_op("fused_add_rms_norm").contract, "//")
    run: Any = SimpleNamespace(path=tmp_path)
    won: Any = SimpleNamespace(best_file="best.cpp", language=Language.CPP)
    (tmp_path / "best.cpp").write_text("int x;\n")
    assert "does not begin with a header" in (pipeline._header_hint(run, won) or "")
    (tmp_path / "best.cpp").write_text(f"{form}\nint x;\n")
    assert pipeline._header_hint(run, won) is None
