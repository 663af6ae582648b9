"""What an installation brings: a core that goes beside an engine's pins, and extras."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from installation import (
    ROOT,
    bare_variables,
    build_wheel,
    closure,
    copy_of_repository,
    install,
    make_environment,
)
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from patch_sample import OP, evaluation

from patcher.extras import extra_of, missing_package
from patcher.integrate import Patch, read_receipts
from patcher.runs.run import Run

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CORE = [Requirement(line) for line in PROJECT["dependencies"]]
ENGINE = ROOT / "tests/data/requirements/vllm-0.33.0.txt"
SQLITE = ROOT / "tests/data/nsys/decode.sqlite"


def engine_requirements() -> list[Requirement]:
    lines = ENGINE.read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if not line.startswith("#")]
    return [one for one in found if one.marker is None or one.marker.evaluate()]


class TestBesideAnEngine:
    def test_the_list_is_what_vllm_pins(self) -> None:
        pins = {one.name: str(one.specifier) for one in engine_requirements()}
        assert len(pins) > 60
        assert pins["torch"] == "==2.14.0"
        assert pins["apache-tvm-ffi"] == "==0.1.11"

    @pytest.mark.parametrize("ours", CORE, ids=lambda one: one.name)
    def test_a_core_requirement_takes_what_the_engine_pins(self, ours: Requirement) -> None:
        assert all(one.operator == ">=" for one in ours.specifier), "loose: no upper end, no pin"
        for theirs in engine_requirements():
            if canonicalize_name(theirs.name) != canonicalize_name(ours.name):
                continue
            named = [Version(one.version) for one in (*ours.specifier, *theirs.specifier)]
            both = [v for v in named if v in ours.specifier and v in theirs.specifier]
            assert both, (
                f"no version of {ours.name} is both {ours.specifier} and {theirs.specifier}"
            )
            pinned = [Version(one.version) for one in theirs.specifier if one.operator == "=="]
            assert all(version in ours.specifier for version in pinned)

    def test_the_core_is_what_it_is_said_to_be(self) -> None:
        names = {one.name for one in CORE}
        assert names == {
            *("apache-tvm-ffi", "packaging", "pydantic", "rich", "tomlkit", "torch", "typer")
        }
        engine = {canonicalize_name(one.name) for one in engine_requirements()}
        assert "transformers" in engine, "the engine's own affair"
        assert "transformers" not in names

    @pytest.mark.slow
    def test_pip_resolves_the_core_beside_vllm(self, tmp_path: Path) -> None:
        report = tmp_path / "report.json"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed"),
                *("--report", str(report), "vllm==0.33.0", *map(str, CORE)),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if "No matching distribution found for vllm==0.33.0" in done.stderr:
            pytest.skip("the package index here does not have vllm 0.33.0")
        assert done.returncode == 0, done.stderr[-3000:]
        found = {
            canonicalize_name(one["metadata"]["name"]): Version(one["metadata"]["version"])
            for one in json.loads(report.read_text())["install"]
        }
        for requirement in (*engine_requirements(), *CORE):
            assert found[canonicalize_name(requirement.name)] in requirement.specifier


class TestExtras:
    def test_all_holds_every_package_of_the_commands(self) -> None:
        extras = PROJECT["optional-dependencies"]
        assert set(closure(["patcher[agent]"])) <= set(closure(["patcher[all]"]))
        for name in ("profile", "report", "transformers"):
            assert {Requirement(r).name for r in extras[name]} - {"patcher"} <= set(
                closure(["patcher[all]"])
            )

    @pytest.mark.parametrize(
        ("package", "command", "extra"),
        [
            ("nanoarrow", "profile", "profile"),
            ("scipy", "evaluate", "profile"),
            ("jinja2", "optimize", "agent"),
            ("jinja2", "report", "report"),
            ("transformers", "throughput", "transformers"),
            ("transformers", "demo", "all"),
            ("pyarrow", "", "parquet"),
            ("torch", "", None),
            ("no-such-package", "profile", None),
        ],
    )
    def test_a_missing_package_names_its_extra(
        self, package: str, command: str, extra: str | None
    ) -> None:
        assert extra_of(package, command) == extra

    def test_an_import_name_is_told_from_a_package_name(self) -> None:
        found = missing_package(ImportError(name="pynvml"), "throughput")
        assert found.hint == "pip install 'patcher[profile]'"
        assert missing_package(ImportError(name="tvm_ffi")).hint == "pip install apache-tvm-ffi"
        assert missing_package(ImportError("libx.so is broken")).message == "libx.so is broken"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return build_wheel(copy_of_repository(folder / "source"), folder)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """Python with patcher's core and nothing else."""
    python = make_environment(tmp_path_factory.mktemp("core") / "env", *map(str, CORE))
    install(python, wheel)
    return python


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """Python with an engine and patcher's core."""
    place = tmp_path_factory.mktemp("served") / "env"
    python = make_environment(place, *map(str, CORE), "transformers")
    install(python, wheel)
    return python


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    candidate = {info.name: source for info, source in OP.solutions()}["cpu_simd"]
    folder = tmp_path_factory.mktemp("bundle") / "norm"
    Patch.create(
        folder, OP, candidate, evaluation(candidate), engine="transformers", made_by="test"
    )
    return folder


class Session:
    """Processes of one environment that share a home."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python, self.folder = python, folder
        self.variables = bare_variables(folder / "home")

    def __call__(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.python), "-P", *arguments],
            cwd=self.folder,
            env={**self.variables, **variables},
            capture_output=True,
            text=True,
            check=False,
        )

    def patcher(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self("-m", "patcher", *arguments)


@pytest.fixture
def in_core(core: Path, tmp_path: Path) -> Session:
    return Session(core, tmp_path)


@pytest.fixture
def in_served(served: Path, tmp_path: Path) -> Session:
    return Session(served, tmp_path)


KERNEL = """
import sys, pathlib, torch
from patcher.integrate import Patch
kernel = Patch.load(pathlib.Path(sys.argv[1])).kernel()
rows, residual, weight = torch.randn(4, 256), torch.randn(4, 256), torch.randn(256)
wanted = residual + rows
kernel(rows, residual, weight, 1e-5)
assert torch.equal(residual, wanted)
scale = torch.rsqrt(wanted.pow(2).mean(-1, keepdim=True) + 1e-5)
torch.testing.assert_close(rows, weight * wanted * scale)
print(sorted({"numpy", "scipy", "jinja2_", "transformers"} & set(sys.modules)))
"""
PLUGIN = """
import importlib.metadata, sys
[entry] = importlib.metadata.entry_points(group="vllm.general_plugins")
entry.load()()
import patcher.integrate.vllm.plugin
import patcher.integrate.activation
print(entry.value, "vllm" in sys.modules)
"""
SERVE = """
import torch, transformers
from patcher.bench import preset
from patcher.integrate import activate
config = transformers.GptOssConfig(**preset("gpt-oss-tiny").config)
model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
prompt = torch.arange(8).reshape(2, 4)
def run():
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4,
                          do_sample=False)
stock = run()
with activate("transformers", model) as active:
    assert not active.failures, active.failures
    assert torch.equal(run(), stock)
    print(len(active.installed), sum(active.installed[0].book.calls.values()))
assert torch.equal(run(), stock)
"""


@pytest.mark.slow
class TestTheCoreAlone:
    def test_it_is_a_core(self, in_core: Session) -> None:
        done = in_core("-c", "import numpy")
        assert "No module named 'numpy'" in done.stderr

    def test_a_kernel_is_built_loaded_and_called(self, in_core: Session, bundle: Path) -> None:
        done = in_core("-c", KERNEL, str(bundle))
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == "[]"

    def test_the_plugin_of_vllm_loads(self, in_core: Session) -> None:
        done = in_core("-c", PLUGIN)
        assert done.stdout.split() == ["patcher.integrate.vllm:register", "False"], done.stderr

    def test_the_report_of_a_run_names_its_extra(self, in_core: Session) -> None:
        with Run.create(in_core.folder / "patcher-runs", command="optimize"):
            pass
        plain = in_core.patcher("report")  # torch brings jinja2
        assert plain.returncode == 0, plain.stderr
        done = in_core.patcher("report", "--patched-profile", str(SQLITE))
        assert done.returncode == 3, done.stderr
        assert "pip install 'patcher[report]'" in " ".join(done.stderr.split())
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize(
        ("arguments", "extra"),
        [
            (("profile", "m", "--from", str(SQLITE)), "profile"),
            (("profile", "m", "--from", str(SQLITE), "--json"), "profile"),
            (("evaluate", OP.name, "kernel.cpp"), "profile"),
            (("optimize", OP.name, "--model", "replay:demo"), "agent"),
            (("demo",), "all"),
        ],
        ids=lambda value: " ".join(value[:1]) if isinstance(value, tuple) else value,
    )
    def test_a_command_names_the_extra_that_it_lacks(
        self, in_core: Session, arguments: tuple[str, ...], extra: str
    ) -> None:
        source = next(c.source for i, c in OP.solutions() if i.name == "cpu_simd")
        (in_core.folder / "kernel.cpp").write_text(source, encoding="utf-8")
        done = in_core.patcher(*arguments)
        assert done.returncode == 3, done.stderr
        told = done.stdout if "--json" in arguments else " ".join(done.stderr.split())
        assert f"pip install 'patcher[{extra}]'" in told
        assert "Traceback" not in done.stderr

    def test_help_and_version(self, in_core: Session) -> None:
        assert in_core.patcher("--version").stdout.strip() == PROJECT["version"]
        assert in_core.patcher("--help").returncode == 0

    def test_the_doctor_says_what_is_missing(self, in_core: Session) -> None:
        done = in_core.patcher("doctor", "--all", "--json")
        found = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
        assert "numpy" in found["extra profile"]["detail"]
        assert found["extra profile"]["fix"] == "pip install 'patcher[profile]'"
        assert found["clocks"]["detail"] == "pynvml is not installed"

    def test_the_api_names_the_extra_that_it_lacks(self, in_core: Session) -> None:
        code = "import patcher\ntry: patcher.profile('x.sqlite')\n"
        code += "except patcher.MissingError as error: print(error.hint)"
        assert in_core("-c", code).stdout.strip() == "pip install 'patcher[profile]'"


@pytest.mark.slow
class TestBesideAServedModel:
    def test_a_patch_is_applied_served_counted_and_reverted(
        self, in_served: Session, bundle: Path
    ) -> None:
        applied = in_served.patcher("apply", str(bundle), "--yes", "--json")
        assert applied.returncode == 0, applied.stderr
        name = json.loads(applied.stdout)["id"]
        assert in_served.patcher("verify", name).returncode == 0
        receipts = in_served.folder / "receipts"
        served = in_served(
            "-c",
            SERVE,
            PATCHER_PATCHES="on",
            PATCHER_STRICT="1",
            PATCHER_RECEIPTS=str(receipts),
        )
        assert served.returncode == 0, served.stderr
        installed, calls = map(int, served.stdout.split())
        assert installed == 1
        assert sum(one.total_calls for one in read_receipts(receipts)) == calls > 0
        shown = in_served.patcher("receipts", str(receipts), "--json")
        assert shown.returncode == 0, shown.stderr
        assert json.loads(shown.stdout)["receipts"][0]["patch_id"] == name
        assert name in in_served.patcher("patches").stdout
        assert in_served.patcher("revert", name).returncode == 0

    def test_scipy_and_pandas_are_not_there(self, in_served: Session) -> None:
        for name in ("scipy", "pandas", "nanoarrow"):
            assert "ModuleNotFoundError" in in_served("-c", f"import {name}").stderr


def test_no_variable_leads_back_to_the_checkout() -> None:
    found = bare_variables(Path("/home/x"), PATCHER_PATCHES="on")
    assert [name for name in found if name.startswith(("PATCHER_", "PYTHON"))] == [
        "PATCHER_HOME",
        "PATCHER_PATCHES",
    ]
    assert {"PATH"} <= found.keys() <= {*os.environ, "PATCHER_HOME", "PATCHER_PATCHES"}
