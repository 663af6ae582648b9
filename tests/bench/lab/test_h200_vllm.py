"""The committed verdicts in vLLM on an H200: what was measured gives them again."""

from __future__ import annotations

import lzma
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from patcher.ab.result import ABResult
from patcher.ab.verdict import decide_again
from patcher.bench import UsageError, content
from patcher.bench.ab.throughput import compare_windows
from patcher.bench.ab.windows import PairKind
from patcher.bench.lab.verdict_table import read, table
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
