"""The Python API: `import patcher` is light, and its functions give what the commands print."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from patch_sample import OP, TINY, evaluation, state
from report_sample import sample

import patcher
from patcher import hotspot
from patcher.api.display import Chart, progress_bar
from patcher.api.evaluate import EvaluationResult
from patcher.api.throughput import ThroughputResult
from patcher.bench import Candidate, content
from patcher.bench.engines import open_engine
from patcher.integrate import Patch, Store, pack
from patcher.places import places_in

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).parents[1] / "data"
SQLITE = DATA / "nsys" / "decode.sqlite"
SOURCES = {info.name: candidate for info, candidate in OP.solutions()}
CPP: Candidate = SOURCES["cpu_simd"]


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return done.stdout.strip()


class TestImport:
    def test_nothing_is_imported_before_it_is_used(self) -> None:
        code = (
            "import sys; before = set(sys.modules); import patcher;"
            "print(sorted({m.split('.')[0] for m in set(sys.modules) - before}"
            " - set(sys.stdlib_module_names)))"
        )
        assert run(code) == "['patcher']"

    def test_it_takes_less_than_50_ms(self) -> None:
        code = "import time, typing; t = time.perf_counter(); import patcher;"
        code += "print(1e3 * (time.perf_counter() - t))"
        assert min(float(run(code)) for _ in range(5)) < 50

    def test_every_name_is_there(self) -> None:
        assert dir(patcher) == sorted(patcher.__all__)
        for name in patcher.__all__:
            assert getattr(patcher, name) is not None
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            patcher.nothing  # noqa: B018

    def test_types_and_names_agree(self) -> None:
        tree = ast.parse((ROOT / "patcher/__init__.py").read_text(encoding="utf-8"))
        [typed] = [n for n in tree.body if isinstance(n, ast.If)]
        names = {
            a.name: n.module for n in typed.body if isinstance(n, ast.ImportFrom) for a in n.names
        }
        assert names == patcher._LAZY
        assert set(names) | {"__version__"} == set(patcher.__all__)

    def test_the_version_has_one_source(self) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert patcher.__version__ == project["version"]

    @pytest.mark.parametrize("name", [n for n in patcher.__all__ if n.islower() and n[0] != "_"])
    def test_a_function_documents_its_arguments(self, name: str) -> None:
        function = getattr(patcher, name)
        documented = inspect.getdoc(function) or ""
        for section in ("Args:", "Raises:", "Examples:"):
            assert section in documented
        for argument in inspect.signature(function).parameters:
            assert f"\n    {argument}: " in documented, argument
        assert "Returns:" in documented or "Yields:" in documented


class TestProfile:
    @pytest.mark.parametrize(
        "file",
        [
            "nsys/decode.sqlite",
            "nsys/cuda_gpu_kern_sum.csv",
            "parquet",
            "kineto/vllm-decode-kineto.json.gz",
        ],
    )
    def test_any_file_without_a_model(self, file: str) -> None:
        path = DATA / file
        assert patcher.profile(str(path)).hotspots == hotspot.read(path).hotspots

    def test_read_takes_a_string(self) -> None:
        assert hotspot.read(str(SQLITE), "m").model == "m"

    def test_it_is_a_profile(self) -> None:
        found = patcher.profile(SQLITE, "gpt-oss-20b")
        assert isinstance(found, hotspot.Profile)
        assert json.loads(found.model_dump_json()) == json.loads(
            hotspot.read(SQLITE, "gpt-oss-20b", places=places_in("gpt-oss-20b")).model_dump_json()
        )

    def test_frames(self) -> None:
        found = patcher.profile(SQLITE, "gpt-oss-20b")
        ranked, kernels = found.to_pandas(), found.to_pandas("kernels")
        assert list(ranked["name"]) == [spot.name for spot in found.hotspots]
        assert kernels["total_ns"].sum() == found.total_kernel_ns
        assert kernels["exposed_ns"].sum() == found.busy_ns
        with pytest.raises(patcher.UsageError, match="unknown rows 'all'"):
            found.to_pandas("all")  # type: ignore[arg-type]

    def test_it_shows_itself(self, tmp_path: Path) -> None:
        found = patcher.profile(SQLITE, "gpt-oss-20b")
        assert len(repr(found)) < 200
        table = str(found).splitlines()
        assert table[0].split() == ["#", "busy", "mean", "us", "ceiling", "do", "kernel,", "chain"]
        assert len(table) == 12
        assert max(map(len, table)) <= 100
        first = found.hotspots[0]
        assert table[1].split()[:2] == ["1", f"{first.share_pct:.1f}%"]
        assert first.triage in table[1]
        assert first.name[:40] in table[1]
        assert found.hotspots[0].name in found._repr_html_()
        chart = found.plot()
        assert chart._repr_svg_().startswith("<svg")
        assert chart.save(str(tmp_path / "p.svg")).read_text(encoding="utf-8") == chart.svg

    def test_wrong_use(self, tmp_path: Path) -> None:
        with pytest.raises(patcher.UsageError, match="cannot read"):
            patcher.profile(tmp_path / "none.sqlite")
        with pytest.raises(patcher.UsageError, match="nothing to profile"):
            patcher.profile()
        with pytest.raises(patcher.UsageError, match="go with a file"):
            patcher.profile(model="gpt-oss-tiny", window="decode")
        with pytest.raises(patcher.UsageError, match="device applies only to a capture"):
            patcher.profile(SQLITE, device="cpu")

    def test_a_capture(self) -> None:
        said: list[str] = []
        found = patcher.profile(
            model="gpt-oss-tiny",
            device="cpu",
            batch=2,
            input_len=8,
            output_len=4,
            threads=1,
            progress=lambda stage, done, total: said.append(stage),
        )
        assert "fused_add_rms_norm" in {spot.op for spot in found.hotspots}
        assert said


class TestEvaluate:
    def test_a_source_that_does_not_compile(self, tmp_path: Path) -> None:
        source = tmp_path / "does_not_compile.cpp"
        source.write_text("int fused_add_rms_norm(", encoding="utf-8")
        found = patcher.evaluate("fused_add_rms_norm", str(source))
        assert found.outcome == "compilation_failure"
        assert found.speedup is None
        assert found.to_pandas().empty
        assert "nothing was timed" in found.plot().svg

    def test_frames_and_pictures(self) -> None:
        judged = sample().best
        assert judged is not None
        found = EvaluationResult.model_validate(judged.model_dump())
        frame = found.to_pandas()
        assert len(frame) == len(found.timings) > 1
        assert list(frame["tokens"]) == [timing.axes["tokens"] for timing in found.timings]
        assert list(frame["speedup"]) == [timing.speedup for timing in found.timings]
        assert repr(found).endswith(f"{found.geomean_speedup:.3f}x against {found.baseline}>")
        assert f"{found.timings[0].speedup:.3f}x" in found._repr_html_()
        assert found.plot().svg.count("speedup, 95 % interval") >= 1

    def test_wrong_use(self, tmp_path: Path) -> None:
        source = tmp_path / CPP.file_name
        source.write_text(CPP.source, encoding="utf-8")
        with pytest.raises(patcher.UsageError, match="unknown language 'rust'"):
            patcher.evaluate(OP.name, source, language="rust")
        with pytest.raises(patcher.UsageError, match="unknown op"):
            patcher.evaluate("no_such_op", source)
        with pytest.raises(patcher.UsageError, match="2 pairs"):
            patcher.evaluate(OP.name, source, pairs=2)
        with pytest.raises(patcher.UsageError, match="counters is for CUDA"):
            patcher.evaluate(OP.name, source, counters=True)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A patch of the op's CPU solution, in one file."""
    folder = tmp_path_factory.mktemp("bundle")
    patch = Patch.create(
        folder / "norm", OP, CPP, evaluation(CPP), engine="transformers", made_by="test"
    )
    pack(patch, folder / "norm.zip")
    return folder / "norm.zip"


@pytest.fixture(scope="module")
def model() -> Any:
    engine = open_engine(TINY)
    yield engine.model
    engine.close()


PROMPT = torch.arange(8).reshape(2, 4)


def generate(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=4, do_sample=False
    )
    return found


class TestPatched:
    def test_in_and_out(self, model: Any, bundle: Path) -> None:
        before, output = state(model), generate(model)
        with patcher.patched(model, str(bundle)) as receipt:
            assert not receipt.calls
            assert torch.equal(generate(model), output)
            live = receipt.total_calls
            assert live > 0
        assert state(model) == before
        assert torch.equal(generate(model), output)
        assert receipt.total_calls == live, "nothing runs after the block, and counts stay"
        assert receipt.record().calls == receipt.calls
        assert receipt.to_pandas()["count"].sum() == live + sum(receipt.fallbacks.values())
        assert f"{live:,} calls" in repr(receipt)
        assert receipt.patch_id in receipt._repr_html_()

    def test_an_exception_takes_it_out(self, model: Any, bundle: Path) -> None:
        before = state(model)
        with pytest.raises(KeyError), patcher.patched(model, bundle):
            raise KeyError
        assert state(model) == before

    def test_one_patch_point_holds_one_patch(self, model: Any, bundle: Path) -> None:
        before = state(model)
        with (
            patcher.patched(model, bundle) as outer,
            pytest.raises(patcher.VerificationError),
            patcher.patched(model, bundle),
        ):
            pass
        assert outer.patch_id
        assert state(model) == before

    def test_blocks_are_nested_over_two_models(self, model: Any, bundle: Path) -> None:
        other = open_engine(TINY)
        with patcher.patched(model, bundle) as outer:
            with patcher.patched(other.model, bundle) as inner:
                generate(other.model)
            assert inner.total_calls > 0
            assert outer.total_calls == 0
            generate(model)
            assert outer.total_calls > 0
        other.close()

    def test_an_applied_patch_by_its_id(
        self, model: Any, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATCHER_HOME", str(tmp_path))
        applied = Store(tmp_path).apply(bundle.with_suffix(""))
        with patcher.patched(model, applied.id) as receipt:
            generate(model)
        assert receipt.total_calls > 0

    def test_wrong_use(self, model: Any, bundle: Path, tmp_path: Path) -> None:
        with (
            pytest.raises(patcher.UsageError, match="neither a bundle nor an applied patch"),
            patcher.patched(model, tmp_path / "none.zip"),
        ):
            pass
        with (
            pytest.raises(patcher.PatcherError),
            patcher.patched(torch.nn.Linear(2, 2), bundle),
        ):
            pass
        vllm = Patch.load(bundle.with_suffix("")).manifest
        target = vllm.target.model_copy(update={"engine": "vllm"})
        folder = tmp_path / "vllm"
        folder.mkdir()
        for name in vllm.files:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes((bundle.with_suffix("") / name).read_bytes())
        text = vllm.model_copy(update={"target": target}).model_dump_json()
        (folder / "manifest.json").write_text(text, encoding="utf-8")
        with (
            pytest.raises(patcher.UsageError, match="is for vllm"),
            patcher.patched(model, folder),
        ):
            pass


class TestThroughput:
    def test_a_verdict_on_the_cpu(self, bundle: Path) -> None:
        found = patcher.throughput(
            "gpt-oss-tiny",
            [bundle],
            device="cpu",
            batch=2,
            input_len=8,
            output_len=4,
            pairs=6,
            quality_steps=4,
            threads=1,
        )
        assert isinstance(found, ThroughputResult)
        assert found.verdict in ("accept", "reject", "inconclusive")
        assert found.interval_pct[0] <= found.gain_pct <= found.interval_pct[1]
        frame = found.to_pandas()
        assert set(frame["arm"]) == {"baseline", "patched"}
        assert set(frame["kind"]) == {"ab", "aa"}
        assert (frame["tokens_per_s"] > 0).all()
        assert found.verdict in repr(found)
        assert found.decision.reasons[0][:20] in found._repr_html_()
        assert "margin" in found.plot().svg

    def test_wrong_use(self, bundle: Path) -> None:
        with pytest.raises(patcher.UsageError, match="nothing to compare"):
            patcher.throughput("gpt-oss-tiny", [])
        with pytest.raises(patcher.UsageError, match="unknown model"):
            patcher.throughput("gpt-nothing", [bundle], device="cpu")
        with pytest.raises(patcher.UsageError, match="5 pairs"):
            patcher.throughput("gpt-oss-tiny", [bundle], pairs=5)


class TestOptimize:
    def test_a_loop_and_what_it_leaves(self, tmp_path: Path) -> None:
        with resources.as_file(resources.files("patcher.kernel_search") / "demo.jsonl.xz") as demo:
            recorded = content(demo).decode("utf-8")
        first = json.loads(recorded.splitlines()[0])
        first["reply"]["text"] = "```cpp\nint fused_add_rms_norm(\n```"
        (tmp_path / "replies.jsonl").write_text(json.dumps(first) + "\n", encoding="utf-8")
        said: list[str] = []
        found = patcher.optimize(
            "fused_add_rms_norm",
            language="cpp",
            model=f"replay:{tmp_path / 'replies.jsonl'}",
            iterations=1,
            threads=1,
            runs_dir=tmp_path,
            progress=lambda stage, done, total: said.append(stage),
        )
        [attempt] = found.attempts
        frame = found.to_pandas()
        assert list(frame["outcome"]) == ["compilation_failure"]
        assert found.folder.parent == tmp_path
        assert (found.folder / "report.html").is_file()
        assert any("evaluate" in stage for stage in said)
        again = patcher.read_run("latest", runs_dir=str(tmp_path))
        assert again == found
        assert "1 candidates" in repr(again)
        assert attempt.outcome.value in again._repr_html_()
        assert "speedup over the strongest baseline" in again.plot().svg

    def test_wrong_use(self, tmp_path: Path) -> None:
        with pytest.raises(patcher.UsageError, match="no runs in"):
            patcher.read_run(runs_dir=tmp_path)
        with pytest.raises(patcher.UsageError, match="unknown language"):
            patcher.optimize("fused_add_rms_norm", language="rust", runs_dir=tmp_path)


class TestDisplay:
    def test_a_chart_goes_to_svg_and_png_alone(self, tmp_path: Path) -> None:
        chart = Chart("a chart", '<svg xmlns="http://www.w3.org/2000/svg"></svg>')
        assert repr(chart) == "<Chart: a chart>"
        with pytest.raises(patcher.UsageError, match="no SVG or PNG"):
            chart.save(tmp_path / "chart.pdf")
        with pytest.raises(patcher.UsageError, match="cannot write"):
            chart.save(tmp_path / "none" / "chart.svg")

    def test_without_pandas_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pandas", None)
        with pytest.raises(patcher.MissingError) as caught:
            patcher.profile(SQLITE).to_pandas()
        assert caught.value.hint == "pip install 'patcher[profile]'"

    def test_a_bar_is_for_people(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with progress_bar(True) as report:
            report("stage", 1, 2)
        assert capsys.readouterr().err == ""
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        with progress_bar(True) as report:
            report("stage", 1, 2)
        assert "stage" in capsys.readouterr().err
        with progress_bar(False) as report:
            report("stage", 1, 2)
        assert capsys.readouterr().err == ""
