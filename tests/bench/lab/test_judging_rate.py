"""How many candidates a judge on Ray has judged in an hour."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from patcher import bench
from patcher.bench import Language
from patcher.bench.lab import judging_rate

OP = "fused_add_rms_norm"


def test_each_candidate_is_new_to_whoever_judged_the_others() -> None:
    for language in (Language.CPP, Language.TRITON):
        sources = ["int a;\n", "int b;\n"]
        made = [*judging_rate.copies(OP, language, sources, 5)]
        again = [*judging_rate.copies(OP, language, sources, 5)]
        assert len({each.digest for each in made + again}) == 10
        mark = "#" if language.in_python else "//"
        for index, each in enumerate(made):
            assert each.source.splitlines()[0] == sources[index % 2].strip()
            assert each.source.splitlines()[1].startswith(f"{mark} copy {index} of ")


def test_nothing_to_judge_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.cpp").touch()
    words = [str(tmp_path / "a.cpp"), "--op", OP, "--language", "cpp", "--out", "x", "--gpus"]
    for wrong in (["-1"], ["1", "--each", "0"], ["1", "--repeats", "0"]):
        assert judging_rate.main([*words, *wrong]) == 2
        assert "nothing would be judged" in capsys.readouterr().err


@pytest.mark.slow
def test_the_cpu_of_this_machine_is_timed(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'patcher[ray]'")
    [good] = [each for info, each in bench.load_op(OP).solutions() if info.name == "cpu_simd"]
    (tmp_path / "good.cpp").write_text(good.source)
    out = tmp_path / "rate.json"
    words = [str(tmp_path / "good.cpp"), "--op", OP, "--language", "cpp", "--out", str(out)]
    options = ["--gpus", "0", "--each", "2", "--repeats", "1", "--points", "1"]
    assert judging_rate.main([*words, *options]) == 0
    found = json.loads(out.read_text())
    assert found["same_as_local"]
    [arm] = found["arms"]
    assert arm["candidates"] == sum(arm["outcomes"].values()) == 2
    assert arm["seconds"] > 0 < arm["judge_s"]
