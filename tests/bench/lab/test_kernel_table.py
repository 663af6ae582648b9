"""The table of the library's kernels, and the page that ships."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path
from statistics import geometric_mean

import pytest
from patch_sample import evaluation

from patcher.bench import Check, Outcome, UsageError, load_op
from patcher.bench.judge.evaluation import Grade
from patcher.bench.lab.kernel_table import main, read, table
from patcher.bench.ops.header import comment_mark, read_header

RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results"
PAGE = RESULTS / "kernels"
H100 = RESULTS / "h100-kernels"


def test_the_page_is_its_verdicts_and_they_are_of_what_ships() -> None:
    """A source that was changed since says so in its header, and the page says it of the row."""
    found = read(PAGE)
    page = (PAGE / "README.md").read_text(encoding="utf-8")
    assert table(found) in page
    earlier = [line for line in page.splitlines() if line.startswith("- *Earlier contract*")]
    for name, one in found:
        op, _, file = name.partition("-")
        solution = file.partition(".")[0]
        shipped = {info.name: candidate for info, candidate in load_op(op).solutions()}
        if shipped[solution].digest != one.digest:
            [source] = (load_op(op).folder / "solutions" / solution).glob(f"{op}.*")
            mark = comment_mark(shipped[solution].language.in_python)
            figures = read_header(source.read_text(encoding="utf-8"), mark)["Figures"]
            assert figures.startswith("not measured since ")
            named = re.findall(r"\(bench/results/kernels/(\S+)\)", figures)
            assert any(fnmatch(name, each) for each in named), name
            assert f"`{op}`" in earlier[0]
        else:
            assert not any(f"`{op}`" in line for line in earlier)
        assert one.environment is not None
        assert one.environment.device_kind == "cuda"


@pytest.mark.parametrize("folder", ["", "others/"])
def test_each_kernel_that_ships_was_judged_by_its_device_code_alone(folder: str) -> None:
    found = read(H100 / folder)
    rows = table(found).replace("](", f"]({folder}")
    assert rows in (H100 / "README.md").read_text(encoding="utf-8")
    for name, one in found:
        op, _, file = name.partition("-")
        shipped = {info.name: candidate for info, candidate in load_op(op).solutions()}
        assert shipped[file.partition(".")[0]].digest == one.digest, name
        assert one.grade is Grade.DEVICE_CODE, name


def test_a_verdict_agrees_with_its_samples_and_its_bounds() -> None:
    assert len(read(PAGE)) == 17
    for name, one in read(PAGE):
        speedups = [timing.speedup for timing in one.timings]
        assert one.geomean_speedup == pytest.approx(geometric_mean(speedups), rel=1e-6), name
        for timing in one.timings:
            assert timing.pairs >= 6, name
            assert timing.speedup_low <= timing.speedup <= timing.speedup_high, name
        assert all(check.passed for check in one.checks), name


def test_a_row_says_what_was_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plain = evaluation()
    [timing] = plain.timings
    wide = timing.model_copy(
        update={"axes": {"tokens": 1024}, "speedup_low": 0.8, "sol_pct": 41.2, "launch_pct": 9.0}
    )
    clean = Check(name="sanitizer", passed=True, detail="memcheck found nothing in 9 calls")
    told = plain.model_copy(
        update={"timings": (timing, wide), "baseline": "vllm", "checks": (clean,), "sweep": "bf16"}
    )
    (tmp_path / "norm.json").write_text(told.model_dump_json())
    (tmp_path / "other.json").write_text(plain.model_dump_json())
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "| 1 | 1,024 |" in out
    assert out.count("By tokens:") == 2
    [row, other] = [line for line in out.splitlines() if line.startswith("| [")]
    assert "| 2.00x<br>1.00 | 2.00x<br>1.00 | **2.00x** | 0.80x | 41 % | 9 % | clean |" in row
    assert "| not run | 1.10 to 1.13x |" in other
    (tmp_path / "norm.json").unlink()
    assert main([str(tmp_path)]) == 0
    assert "sanitizer" not in capsys.readouterr().out
    aside = clean.model_copy(update={"detail": f"{clean.detail}; 9 reports of racecheck set aside"})
    (tmp_path / "norm.json").write_text(
        told.model_copy(update={"checks": (aside,)}).model_dump_json()
    )
    assert main([str(tmp_path)]) == 0
    assert "| 9 % | clean, races set aside |" in capsys.readouterr().out
    assert "cpp, sweep `bf16` |" in row, "there are two of this op"


def test_what_has_no_row_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="holds no verdict"):
        read(tmp_path)
    wrong = evaluation(outcome=Outcome.MISMATCH)
    (tmp_path / "wrong.json").write_text(wrong.model_dump_json())
    with pytest.raises(UsageError, match="is mismatch"):
        read(tmp_path)
    (tmp_path / "wrong.json").write_text("{}")
    assert main([str(tmp_path)]) == 2
    assert "holds no verdict" in capsys.readouterr().err
    assert main([]) == 2
