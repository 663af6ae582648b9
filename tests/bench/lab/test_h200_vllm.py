"""The committed verdicts in vLLM on an H200: what was measured gives them again."""

from __future__ import annotations

import json
import lzma
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from command_line import patcher

from patcher.ab.result import ABResult
from patcher.ab.verdict import decide_again
from patcher.bench import UsageError, content
from patcher.bench.ab.throughput import compare_windows
from patcher.bench.ab.windows import PairKind
from patcher.bench.lab.verdict_table import read, table
from patcher.bench.lab.vllm_cases import CASES
from patcher.bench.stats.comparison import Comparison
from patcher.integrate import Patch, unpacked

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "bench/results/h200-vllm"
FILES = sorted(FOLDER.glob("*.json.xz"))
ALONE = read(FOLDER / "alone")


def digest_of(bundle: Path) -> str:
    with unpacked(bundle) as folder:
        return Patch.load(folder).digest


def bundles_of(kept: ABResult) -> list[Path]:
    """Those that were measured, and no others of the same name."""
    by_digest = {digest_of(path): path for path in (FOLDER / "bundles").rglob("*.zip")}
    return [by_digest[one.receipt.digest] for one in kept.measured]


def figures(comparison: Comparison | None) -> dict[str, Any]:
    """All of a comparison but its reason, whose words may change after it was recorded."""
    assert comparison is not None
    return comparison.model_dump(exclude={"reason"})


def test_there_are_verdicts() -> None:
    assert {path.name for path in FILES} == {"rope_kv_update.json.xz", "together.json.xz"}
    assert len(ALONE) == 8
    assert read(FOLDER) == [ABResult.model_validate_json(content(file)) for file in FILES]


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_its_windows_and_bundles_give_the_verdict_again(file: Path) -> None:
    kept = ABResult.model_validate_json(content(file))
    found = kept.measured[0].throughput

    def anew(kind: PairKind, stated: Comparison) -> Comparison | None:
        windows = list(found.windows)
        return compare_windows(windows, kind, stated.margin_pct, stated.confidence_pct)

    assert figures(anew("ab", found.comparison)) == figures(found.comparison)
    if found.control is not None:
        assert figures(anew("aa", found.control)) == figures(found.control)
    with ExitStack() as stack:
        patches = [Patch.load(stack.enter_context(unpacked(one))) for one in bundles_of(kept)]
        again = decide_again(file, patches)
    assert [one.verdict for one in again.decisions] == [one.verdict for one in kept.decisions]
    for one in kept.measured:
        timed = sum(window.kernel_calls or 0 for window in found.windows)
        assert one.receipt.total_calls > 0
        assert len(kept.measured) > 1 or one.receipt.total_calls == timed


@pytest.mark.parametrize("kept", [*read(FOLDER), *ALONE], ids=lambda kept: "+".join(kept.patches))
def test_its_row_of_the_table_is_on_the_page(kept: ABResult) -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = table([kept]).splitlines()[2:]
    assert f"{kept.decision.gain_pct:+.2f} %" in rows[0]
    assert all(row in readme for row in rows[:-1])
    assert [bundle.stem for bundle in bundles_of(kept)] == list(kept.patches)
    assert not re.search(r"/(tmp|home|root|work)/", readme)


@pytest.mark.parametrize("bundle", sorted((FOLDER / "bundles").rglob("*.zip")))
def test_a_bundle_leaves_out_its_binary_and_nothing_else(bundle: Path) -> None:
    with unpacked(bundle) as folder:
        patch = Patch.load(folder)
        assert patch.files == (patch.manifest.source,)
        assert patch.candidate().digest == patch.evaluation.digest


@pytest.mark.parametrize("kept", ALONE, ids=lambda kept: "+".join(kept.patches))
def test_the_windows_of_one_alone_give_its_row_again(kept: ABResult) -> None:
    found = kept.measured[0].throughput
    stated = found.comparison
    again = compare_windows(list(found.windows), "ab", stated.margin_pct, stated.confidence_pct)
    assert figures(again) == figures(stated)


def test_samples_in_a_damaged_file_are_no_verdict(tmp_path: Path) -> None:
    whole = FILES[0].read_bytes()
    for wrong in (whole[:-40], b"no xz", b""):
        (tmp_path / "verdict.json.xz").write_bytes(wrong)
        with pytest.raises(UsageError, match="damaged xz file"):
            read(tmp_path)
        with pytest.raises(UsageError, match="damaged xz file"):
            decide_again(tmp_path / "verdict.json.xz", [])
    (tmp_path / "verdict.json.xz").write_bytes(lzma.compress(b"{}"))
    with pytest.raises(UsageError, match="holds no verdict"):
        read(tmp_path)


def test_the_script_of_the_session_says_what_the_commands_take(tmp_path: Path) -> None:
    """Its Python notes what it is told and makes the files that the script goes on from."""
    python, program = tmp_path / "a python", tmp_path / "program.py"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{program}" "$@"\n')
    program.write_text(
        "import json, sys\n"
        "from pathlib import Path\n"
        "words = sys.argv[1:]\n"
        f"with open({str(tmp_path / 'said')!r}, 'a') as file:\n"
        "    print(json.dumps(words), file=file)\n"
        "if '--out' in words:\n"
        "    Path(words[words.index('--out') + 1]).write_text('{}')\n"
        "    sys.exit(1)\n"
        "if 'evaluate' in words:\n"
        "    print('{\"outcome\": 0}')\n"
        "if '--keep' in words:\n"
        "    Path(words[words.index('--keep') + 1]).mkdir()\n"
    )
    python.chmod(0o755)

    def run(*stages: str) -> list[list[str]]:
        (tmp_path / "said").write_text("")
        done = subprocess.run(
            ["bash", str(ROOT / "bench/lab/h200.sh"), str(tmp_path / "out"), *stages],
            env=os.environ | {"PYTHON": str(python)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in (tmp_path / "said").read_text().splitlines()]

    measured = ("together", "stock", "alone", "one", "served")
    stages = ("kernels", "bundles", "points", *measured, "profiles")
    said = run(*stages)
    assert run("kernels", *measured) == []
    kernel = tmp_path / "out/kernels/moe_route-cuda_tuned.json"
    begun = kernel.rename(f"{kernel}.part")
    assert run("kernels") == [], "another has begun it"
    begun.unlink()
    assert [words[2:4] for words in run("kernels")] == [["evaluate", "moe_route"]]
    outs = {Path(words[words.index("--out") + 1]).stem: words for words in said if "--out" in words}
    assert set(outs) == set(measured)
    searched = {name for name, words in outs.items() if {"--tune-baseline", "tune"} & {*words}}
    assert searched == {"together", "stock"}
    verdicts = tmp_path / "out/verdicts"
    (verdicts / "together.json").unlink()
    for name in ("alone", "one", "served"):
        (verdicts / f"{name}.json").unlink()
    for again in run("together", "alone", "one", "served"):
        assert "--tune-baseline" not in again
        assert again[again.index("--tuned") + 1] == str(verdicts / "stock.json")
    [points] = [words for words in said if words[1] != "patcher"]
    said.remove(points)
    assert set(points[points.index("--ops") + 1].split(",")) <= set(CASES)
    assert {words[2] for words in said} == {"evaluate", "bundle", "throughput", "profile"}
    command_of = [words[2 : 3 + (words[2] == "throughput")] for words in said]
    help_of = {
        " ".join(names): patcher(*names, "--help", cwd=tmp_path).stdout for names in command_of
    }
    assert set(help_of) > {"throughput compare", "throughput tune", "throughput best-set"}
    for names, words in zip(command_of, said, strict=True):
        options = {word for word in words if word.startswith("--")}
        assert options
        assert all(re.search(rf"{option}\b", help_of[" ".join(names)]) for option in options)
        if words[2] in ("evaluate", "bundle"):
            assert (ROOT / words[4]).is_file()
    wrong = subprocess.run(
        ["bash", str(ROOT / "bench/lab/h200.sh"), str(tmp_path / "out"), "everything"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert wrong.returncode == 2
    assert "no stage everything" in wrong.stderr


def test_no_stage_of_the_session_is_written_twice() -> None:
    """The shell would take the later one and say nothing."""
    script = (ROOT / "bench/lab/h200.sh").read_text()
    named = re.findall(r"^(\w+)\(\) \{", script, re.MULTILINE)
    assert len(named) == len(set(named)) > 8
    [called] = re.findall(r"^    (.*)\) \"\$stage\" ;;$", script, re.MULTILINE)
    assert set(called.split(" | ")) <= set(named)


def test_what_failed_in_the_session_is_no_result(tmp_path: Path) -> None:
    for stage in ("kernels", "together"):
        done = subprocess.run(
            ["bash", str(ROOT / "bench/lab/h200.sh"), str(tmp_path / "out"), stage, "bundles"],
            env=os.environ | {"PYTHON": "false"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
    assert not list((tmp_path / "out").rglob("*.json"))
