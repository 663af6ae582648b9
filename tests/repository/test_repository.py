"""What holds the repository together: the import rule, the layout, the wheel."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("bench", "hotspot", "integrate", "patcher")
SEES = {
    "bench": {"bench"},
    "hotspot": {"bench", "hotspot"},
    "integrate": {"bench", "integrate"},
    "patcher": {"bench", "hotspot", "integrate", "patcher"},
}
"""kernels (data) <- bench <- hotspot, integrate <- patcher."""
PUBLIC = {
    "bench": {
        "ab",
        "engines",
        "judge",
        "machine",
        "runner",
        "sandbox",
        "selftest",
        "stats",
        "toolchains",
    },
    "hotspot": {
        "capture",
        "compare",
        "ledger",
        "nsys",
        "profile",
        "read",
        "step_bytes",
        "step_ledger",
        "step_record",
    },
    "integrate": {"switches", "verify"},
}
"""Folders and files that other rooms may import; everything else goes through the `__init__`."""
LAB = Path("bench", "lab")
"""How our own tables are made: it sees every room, and no room sees it."""
INIT = "__init__.py"
FILES = [
    path
    for room in ROOMS
    for path in sorted((ROOT / room).rglob("*.py"))
    if not any(parent.is_symlink() for parent in path.parents)
]


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # what is copied into a sandbox has another name there, and only its siblings
            assert node.level <= (path.parent.name == "runner"), f"{path}: relative import"
            module = "" if node.level else node.module or ""
            # `from patcher import bench` names a room
            found += [f"patcher.{a.name}" for a in node.names] if module == "patcher" else [module]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    inside = path.relative_to(ROOT)
    if inside.is_relative_to(LAB):
        return
    room = inside.parts[0]
    for name in imports(path):
        assert name.partition(".")[0] not in {"kernels", "tests", "bench", "hotspot", "integrate"}
        if name.partition(".")[0] == "patcher":
            top, _, rest = name.removeprefix("patcher.").partition(".")
            assert not name.startswith("patcher.bench.lab"), "the lab is no part of the product"
            assert (top if top in ROOMS else "patcher") in SEES[room], f"{room} must not see {name}"
            if top in ROOMS and top != room and rest:
                assert rest.split(".")[0] in PUBLIC[top], f"{name} is private to {top}"


def test_no_folders_import_each_other_in_a_circle() -> None:
    """Over folders, as `test_no_two_files_import_each_other` is over files; late imports count."""
    arrows: dict[str, set[str]] = {}
    for path in FILES:
        inside = path.relative_to(ROOT)
        if path.parent.parent == ROOT and inside.parts[0] != "patcher":
            continue
        here = part(inside.as_posix())
        for name in imports(path) if here else ():
            there = part(named_file(name))
            if there and here != there:
                arrows.setdefault(here, set()).add(there)
    while arrows:
        free = [here for here, there in arrows.items() if not there & arrows.keys()]
        assert free, f"a circle among {sorted(arrows)}"
        for here in free:
            del arrows[here]


def named_file(name: str) -> str:
    """The file of a module, from the root; empty for what is not ours."""
    inside = name.removeprefix("patcher.").replace(".", "/")
    places = (
        f"{inside}.py",
        f"{inside}/{INIT}",
        f"patcher/{inside}.py",
        f"patcher/{inside}/{INIT}",
    )
    return next((place for place in places if (ROOT / place).is_file()), "")


def part(file: str) -> str:
    """The folder of a room, or a file that lies in the room itself; empty: a room's face."""
    top, _, rest = file.partition("/")
    return "" if rest in ("", INIT) else f"{top}/{rest.split('/')[0].removesuffix('.py')}"


def test_evaluate_reaches_at_most_102_files() -> None:
    """Its own file, the command line's, and all that these import, late imports included."""
    todo = [ROOT / "patcher" / "cli.py", ROOT / "patcher" / "commands" / "evaluate.py"]
    reached: set[Path] = set()
    while todo:
        path = todo.pop()
        if path not in reached:
            reached.add(path)
            todo += imported_files(path)
    assert ROOT / "bench" / "judge" / "judge.py" in reached
    assert len(reached) <= 102, sorted(str(path.relative_to(ROOT)) for path in reached)


def imported_files(path: Path) -> Iterator[Path]:
    """The files of ours that a file imports when it or its functions run, packages included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node not in for_types:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            words = name.split(".")
            for end in range(2, len(words) + 1):
                if words[0] == "patcher" and (file := named_file(".".join(words[:end]))):
                    yield ROOT / file


def test_no_two_files_import_each_other() -> None:
    seen = {path.relative_to(ROOT): set(loaded(path)) for path in FILES}
    for path, others in seen.items():
        for other in others:
            assert path not in seen[other], f"{path} and {other} import each other"


def loaded(path: Path) -> Iterator[Path]:
    """The files that are imported as soon as this one is, and not when a function runs."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    late = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node not in late:
            for alias in node.names:  # a file of the package, or else a name of the module
                module = [x for x in node.module.split(".") if x != "patcher"]
                if node.module.split(".")[1:2] and module[0] not in ROOMS:
                    module = ["patcher", *module]
                places = (Path(*module, alias.name), Path(*module))
                files = (at for each in places for at in (each.with_suffix(".py"), each / INIT))
                if found := next((at for at in files if ROOT / at in FILES), None):
                    yield found


def test_no_public_class_name_is_defined_twice() -> None:
    """A name says one thing in the whole product; what is private to a file may be called alike."""
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert not {name: files for name, files in places.items() if len(files) > 1}


def test_what_a_served_engine_imports_is_torch_and_the_standard_library() -> None:
    files = ("dispatch.py", "guards.py", "counts.py", "keys.py", "layers.py")
    beside = {f"patcher.integrate.{Path(file).stem}" for file in files}
    for file in files:
        names = {name for name in imports(ROOT / "integrate" / file) if name not in beside}
        assert {n.partition(".")[0] for n in names} - set(sys.stdlib_module_names) <= {"torch"}


def test_kernels_is_no_package_and_no_room_has_a_drawer() -> None:
    assert not list((ROOT / "kernels").rglob("__init__.py"))
    assert not [path for path in FILES if path.stem in ("utils", "common", "helpers")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_hold_one_idea(path: Path) -> None:
    # one file that can go into a sandbox alone
    limit = {"confine.py": 840}.get(path.name, 350)
    assert len(path.read_text(encoding="utf-8").splitlines()) <= limit


def test_the_runner_imports_neither_the_judge_nor_torch_before_it_is_told_to() -> None:
    code = (
        "import patcher.bench.runner.runner, sys;"
        "print('torch' in sys.modules, 'scipy' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.split() == ["False", "False"]


MOST_TRACKED_BYTES = 87 << 17


def test_tracked_files_stay_small() -> None:
    """Results, recordings and pictures are kept compressed, and earlier ones in git's history."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    listed = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"],
        capture_output=True,
        check=True,
        cwd=ROOT,
    )
    files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    sizes = {path: path.lstat().st_size for path in files if os.path.lexists(path)}
    assert len(sizes) > 500
    largest = sorted(sizes, key=lambda path: -sizes[path])[:10]
    told = "\n".join(f"{sizes[path]:>9,} {path.relative_to(ROOT)}" for path in largest)
    assert sum(sizes.values()) <= MOST_TRACKED_BYTES, told


def test_readme_and_makefile_agree() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)", readme, re.MULTILINE))
    assert {a or b for a, b in named} <= targets
    assert {"demo", "test"} <= {a or b for a, b in named}


def test_versions_and_changelog() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["version"])
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in changes
    assert re.search(
        rf"^## \[{re.escape(project['version'])}\] - \d{{4}}-\d\d-\d\d$", changes, re.M
    )
    constraints = (ROOT / "constraints.txt").read_text()
    assert "torch==2.13.0\n" in constraints
    assert not re.search(r"^(nvidia-(?!ml-py)|triton|cuda)", constraints, re.MULTILINE)


def test_the_wheel_holds_the_kernel_library_and_no_package_called_kernels(tmp_path: Path) -> None:
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"),
            *("-w", str(tmp_path), str(copy_of_repository(tmp_path / "source"))),
        ],
        check=True,
        capture_output=True,
    )
    [wheel] = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    product = {p.relative_to(ROOT) for p in FILES if not p.relative_to(ROOT).is_relative_to(LAB)}
    installed = {p if p.parts[0] == "patcher" else Path("patcher", p) for p in product}
    assert {path.as_posix() for path in installed} <= names, "every package"
    assert {
        "patcher/bench/ab/cloze.toml",
        "patcher/bench/ab/traffic.toml",
        "patcher/bench/judge/counters.toml",
        "patcher/bench/judge/tripwires.toml",
        "patcher/bench/py.typed",
        "patcher/bench/toolchains/hints/cpp.md.j2",
        "patcher/bench/workloads/gpt-oss-20b.toml",
        "patcher/example.toml",
        "patcher/hotspot/families.toml",
        "patcher/integrate/sglang/sources.json",
        "patcher/integrate/vllm/sources.json",
        "patcher/kernel_library/fused_add_rms_norm/op.toml",
        "patcher/kernel_library/fused_add_rms_norm/solutions/cuda_row/fused_add_rms_norm.cu",
        "patcher/memory/patterns.toml",
        "patcher/memory/words.txt",
        "patcher/kernel_search/demo.jsonl.xz",
        "patcher/prompting/templates/generate.md.j2",
        "patcher/report/report.html.j2",
    } <= names
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"patcher", f"{wheel.name.split('-py3')[0]}.dist-info"}, "nothing beside patcher"
    unwanted = ("patcher/bench/lab", "patcher/bench/results", "patcher/selftest_corpus")
    assert not [name for name in names if name.startswith(unwanted)]


PYTHON_DOUBLE = """#!/bin/bash
# A double of .venv/bin/python: pip would go to the network. The set-up's own Python really runs.
printf '%s\\n' "$*" >> "{log}"
case "$*" in
  "-m pip --version") exit 0 ;;
  *--dry-run*) while [ "$1" != --report ]; do shift; done; cp "{report}" "$2" ;;
  -c*torch*) echo "{installed}" ;;
  "- "*) exec "{python}" "$@" ;;
esac
"""
CPU_INDEX = "--index-url https://download.pytorch.org/whl/cpu"


@pytest.mark.skipif(
    Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None,
    reason="with a GPU any build of torch is welcome",
)
@pytest.mark.parametrize(
    ("installed", "needs", "asked"),
    [
        ("", ["filelock"], "torch==2.13.0"),
        ("", ["filelock", 'nvidia-x; extra == "gpu"'], "torch==2.13.0"),
        ("", ["filelock", "nvidia-cublas"], f"{CPU_INDEX} torch==2.13.0"),
        ("", ["triton==3.7.0"], f"{CPU_INDEX} torch==2.13.0"),
        ("2.12.0", ["cuda-bindings"], f"{CPU_INDEX} torch==2.13.0"),
        ("2.13.0", ["nvidia-cublas"], None),
    ],
)
def test_without_a_gpu_the_set_up_never_lets_pip_take_a_cuda_build(
    tmp_path: Path, installed: str, needs: list[str], asked: str | None
) -> None:
    root, log, report = tmp_path / "a folder", tmp_path / "log", tmp_path / "report.json"
    for name in (".ci/setup", "constraints.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    report.write_text(json.dumps({"install": [{"metadata": {"requires_dist": needs}}]}))
    double = root / ".venv/bin/python"
    double.parent.mkdir(parents=True)
    double.write_text(
        PYTHON_DOUBLE.format(log=log, report=report, installed=installed, python=sys.executable)
    )
    double.chmod(0o755)

    subprocess.run([str(root / ".ci/setup")], check=True, capture_output=True)

    pip = "-m pip --disable-pip-version-check install -q"
    installs = [line for line in log.read_text().splitlines() if line.startswith(pip)]
    *torch, tools, alone = [line for line in installs if "--dry-run" not in line]
    assert torch == ([f"{pip} {asked}"] if asked else [])
    assert tools == f"{pip} --constraint constraints.txt --editable .[dev]"
    assert alone == f"{pip} --constraint constraints.txt --no-deps flashinfer-bench"


def copy_of_repository(target: Path) -> Path:
    """Building writes beside the sources, so it happens on a copy."""
    ignore = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "patcher-runs")
    shutil.copytree(ROOT, target, ignore=ignore, symlinks=True)
    return target


def test_tests_lie_where_what_they_test_does_and_import_no_test() -> None:
    for path in (ROOT / "tests").rglob("test_*.py"):
        if {"data", "corpus"} & set(path.parts):
            continue
        folder = path.parent.relative_to(ROOT / "tests")
        if folder != Path("repository"):
            assert folder.parts, path  # beside the folders, not in one
            assert (ROOT / folder).is_dir() or (ROOT / f"{folder}.py").is_file(), path
        source = path.read_text(encoding="utf-8")
        assert not re.search(r"^\s*(from|import) test_", source, re.MULTILINE), path
