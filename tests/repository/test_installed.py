"""Installed, not only checked out: wheel and sdist in clean environments, in any folder."""

from __future__ import annotations

import json
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from installation import (
    ROOT,
    bare_variables,
    build_sdist,
    build_wheel,
    copy_of_repository,
    install,
    make_environment,
)
from patch_sample import OP, evaluation

from patcher.integrate import Patch, pack

pytestmark = pytest.mark.slow
SQLITE = ROOT / "tests/data/nsys/decode.sqlite"
BUSY = "this machine is too busy"
TRIES = 4
"""A machine that is too busy to time anything says so; it is asked again."""


class Archives:
    """What a release consists of."""

    def __init__(self, folder: Path) -> None:
        source = copy_of_repository(folder / "source")
        self.sdist = build_sdist(source, folder / "sdist")
        self.wheel = build_wheel(source, folder / "wheel")
        with tarfile.open(self.sdist) as archive:
            archive.extractall(folder, filter="data")
        self.unpacked = folder / self.sdist.name.removesuffix(".tar.gz")
        self.rebuilt = build_wheel(self.unpacked, folder / "rebuilt")


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Archives:
    return Archives(tmp_path_factory.mktemp("archives"))


@pytest.fixture(scope="module")
def environments(
    tmp_path_factory: pytest.TempPathFactory, archives: Archives
) -> Callable[[str], Path]:
    """Python with the wheel, or with what the sdist builds, and all that `all` brings."""
    made: dict[str, Path] = {}

    def environment(kind: str) -> Path:
        if kind not in made:
            place = tmp_path_factory.mktemp(kind) / "env"
            made[kind] = make_environment(place, "patcher[all]")
            install(made[kind], archives.wheel if kind == "wheel" else archives.rebuilt)
        return made[kind]

    return environment


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    candidate = {info.name: source for info, source in OP.solutions()}["cpu_simd"]
    folder = tmp_path_factory.mktemp("bundle")
    patch = Patch.create(
        folder / "norm", OP, candidate, evaluation(candidate), engine="transformers", made_by="test"
    )
    pack(patch, folder / "norm.zip")
    return folder / "norm.zip"


def empty(folder: Path) -> None:
    """A folder with nothing in it."""


def names_like_ours(folder: Path) -> None:
    """Somebody's project that has files of the names that our repository has."""
    for name in ("bench", "hotspot", "integrate", "kernels/__init__", "tests/__init__"):
        file = folder / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text("raise ImportError('not yours')\n", encoding="utf-8")
    (folder / "kernels/fused_add_rms_norm").mkdir()
    (folder / "kernels/fused_add_rms_norm/op.toml").write_text("not = 'a contract'\n")
    (folder / "patcher-runs").mkdir()
    (folder / "pyproject.toml").write_text("[project]\nname = 'theirs'\nversion = '1'\n")


FOLDERS = [empty, names_like_ours]


class Installed:
    """Commands of an installation in a folder of somebody's."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python, self.folder = python, folder
        self.variables = bare_variables(folder.parent / "home")

    def run(self, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            list(map(str, command)),
            cwd=self.folder,
            env={**self.variables, **variables},
            capture_output=True,
            text=True,
            check=False,
        )

    def patcher(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """The script that pip made."""
        return self.run(self.python.with_name("patcher"), *arguments)

    @property
    def package(self) -> Path:
        [found] = self.python.parent.parent.glob("lib/python*/site-packages/patcher")
        return found


@pytest.fixture(params=FOLDERS, ids=lambda fill: fill.__name__)
def wheel(
    request: pytest.FixtureRequest, environments: Callable[[str], Path], tmp_path: Path
) -> Installed:
    return make(request.param, environments("wheel"), tmp_path)


def make(fill: Callable[[Path], None], python: Path, folder: Path) -> Installed:
    place = folder / "somewhere"
    place.mkdir()
    fill(place)
    return Installed(python, place)


class TestArchives:
    def test_the_sdist_builds_the_same_wheel(self, archives: Archives) -> None:
        ours, theirs = zipfile.ZipFile(archives.wheel), zipfile.ZipFile(archives.rebuilt)
        assert sorted(ours.namelist()) == sorted(theirs.namelist())
        for name in ours.namelist():
            assert ours.read(name) == theirs.read(name), name

    def test_the_sdist_has_the_cases_of_the_self_test(self, archives: Archives) -> None:
        cases = ROOT / "tests/corpus"
        for path in cases.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                inside = path.relative_to(ROOT)
                assert (archives.unpacked / inside).read_bytes() == path.read_bytes(), inside

    def test_neither_holds_results_laboratory_or_other_tests(self, archives: Archives) -> None:
        with tarfile.open(archives.sdist) as archive:
            names = [name.partition("/")[2] for name in archive.getnames()]
        unwanted = ("patcher/bench/lab", "patcher/bench/results", ".")
        assert not [name for name in names if name.startswith(unwanted)]
        beside = [name for name in names if name.startswith("tests/")]
        assert beside
        assert not [name for name in beside if Path(name).parts[:2] != ("tests", "corpus")]


class TestWheel:
    def test_ops(self, wheel: Installed) -> None:
        found = json.loads(wheel.patcher("ops", "--json").stdout)["ops"]
        library = ROOT / "kernels"
        assert {op["name"] for op in found} == {
            path.parent.name for path in library.glob("*/op.toml")
        }

    def test_python_m_patcher(self, wheel: Installed) -> None:
        done = wheel.run(wheel.python, "-m", "patcher", "ops")
        assert done.returncode == 0, done.stderr
        assert OP.name in done.stdout

    def test_profile(self, wheel: Installed) -> None:
        done = wheel.patcher("profile", "gpt-oss-20b", "--from", SQLITE, "--json")
        assert done.returncode == 0, done.stderr
        assert OP.name in {spot["op"] for spot in json.loads(done.stdout)["hotspots"]}

    def test_evaluate(self, wheel: Installed) -> None:
        source = wheel.package / f"kernel_library/{OP.name}/solutions/cpu_simd/{OP.name}.cpp"
        for _ in range(TRIES):
            done = wheel.patcher("evaluate", OP.name, source, "--pairs", "3", "--json")
            found = json.loads(done.stdout)
            if "error" not in found and found["outcome"] == "correct":
                return
            refused = "error" in found and BUSY in found["error"]["message"]
            failed = {check["name"] for check in found.get("checks", ()) if not check["passed"]}
            assert refused or failed == {"clocks"}, done.stdout + done.stderr
        pytest.skip("other programs keep this machine too busy to time anything")

    def test_verify(self, wheel: Installed, bundle: Path) -> None:
        done = wheel.patcher("verify", bundle)
        assert done.returncode == 0, done.stdout + done.stderr

    def test_selftest(self, wheel: Installed) -> None:
        corpus = ROOT / "tests/corpus"
        done = wheel.patcher("selftest", "--corpus", corpus, "--only", "^cheat/66_", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        card = json.loads(done.stdout)
        assert [case["passed"] for case in card["results"]] == [True]
        lacking = wheel.patcher("selftest", "--only", "^cheat/66_")
        assert lacking.returncode == 2
        assert "--corpus" in lacking.stderr

    def test_the_plugin_of_vllm(self, wheel: Installed) -> None:
        code = (
            "from importlib.metadata import entry_points\n"
            "[entry] = entry_points(group='vllm.general_plugins')\n"
            "print(entry.load()())"
        )
        script = wheel.folder / "serve.py"
        script.write_text(code, encoding="utf-8")
        done = wheel.run(wheel.python, script)
        assert (done.returncode, done.stdout.strip()) == (0, "None"), done.stderr

    def test_the_python_api(self, wheel: Installed) -> None:
        code = f"import patcher; print(patcher.profile({str(SQLITE)!r}).hotspots[0].name)"
        done = wheel.run(wheel.python, "-c", code)
        assert "_matmul_ogs" in done.stdout, done.stderr


SERVE = """
import torch, transformers
import bench
from patcher.bench import preset
from patcher.integrate import activate
config = transformers.GptOssConfig(**preset("gpt-oss-tiny").config)
model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
prompt = torch.arange(8).reshape(2, 4)
with activate("transformers", model) as active, torch.no_grad():
    model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4)
    print(bench.OURS, [sum(one.book.calls.values()) > 0 for one in active.installed])
"""


def test_a_bench_py_beside_a_serving_script(
    environments: Callable[[str], Path], tmp_path: Path, bundle: Path
) -> None:
    serving = make(empty, environments("wheel"), tmp_path)
    (serving.folder / "bench.py").write_text("OURS = 'theirs'\n", encoding="utf-8")
    (serving.folder / "serve.py").write_text(SERVE, encoding="utf-8")
    assert serving.patcher("apply", bundle, "--yes").returncode == 0
    on = {"PATCHER_PATCHES": "on", "PATCHER_STRICT": "1"}
    done = serving.run(serving.python, "serve.py", **on)
    assert done.stdout.strip() == "theirs [True]", done.stderr


def test_the_demo(environments: Callable[[str], Path], tmp_path: Path) -> None:
    somewhere = make(names_like_ours, environments("wheel"), tmp_path)
    done = somewhere.patcher("demo")
    for _ in range(TRIES):
        if done.returncode in (0, 1):
            break
        said = " ".join(done.stderr.split())
        assert f"op {OP.name}:" in said
        assert BUSY in said
        done = somewhere.patcher("resume", "latest")
    else:
        pytest.skip("other programs keep this machine too busy to time anything")
    [page] = (somewhere.folder / "patcher-runs").glob("*/report.html")
    assert OP.name in page.read_text(encoding="utf-8")


def test_what_the_sdist_builds_runs_its_own_cases(
    environments: Callable[[str], Path], archives: Archives, tmp_path: Path
) -> None:
    somewhere = make(names_like_ours, environments("sdist"), tmp_path)
    assert OP.name in somewhere.patcher("ops").stdout
    corpus = archives.unpacked / "tests/corpus"
    done = somewhere.patcher("selftest", "--corpus", corpus, "--only", "^cheat/66_", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    [case] = json.loads(done.stdout)["results"]
    assert case["passed"]
