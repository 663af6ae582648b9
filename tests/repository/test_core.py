"""Commands of the core, and what a served engine loads, in a process that can import nothing
else."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from installation import ROOT, bare_variables, closure

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BLOCKED = f"""
import sys
from importlib.metadata import packages_distributions
from packaging.utils import canonicalize_name as canonical

core = set({closure(PROJECT["dependencies"])!r}) - {{"numpy"}}
ours = packages_distributions()
class Blocker:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in ours and top != "patcher" and not core & set(map(canonical, ours[top])):
            raise ModuleNotFoundError(f"No module named {{top!r}}", name=top)
sys.meta_path.insert(0, Blocker())
"""
COMMAND = "from patcher.cli import main\nmain()\n"
SERVED = """
import patcher.integrate.activation, patcher.integrate.vllm.plugin
import patcher.integrate.sglang.plugin
print("loaded")
"""


def run(folder: Path, *arguments: str, program: str = COMMAND) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", BLOCKED + program, *arguments],
        cwd=folder,
        env=bare_variables(folder / "home", COLUMNS="300"),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("review none", "none is not a run"),
        ("accept none", "none is not a run"),
        ("reject none", "none is not a run"),
        ("record none folder", "no run 'none'"),
        ("replay folder", "holds no recording"),
        ("profile m --from x.sqlite", "pip install 'patcher[profile]'"),
    ],
)
def test_a_command_runs_or_names_its_extra(command: str, told: str, tmp_path: Path) -> None:
    done = run(tmp_path, *command.split())
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_the_doctor_runs(tmp_path: Path) -> None:
    done = run(tmp_path, "doctor", "--all", "--json")
    found = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert found["clocks"]["detail"] == "pynvml is not installed"
    assert found["extra profile"]["status"] == "ok", "it is installed, though it is blocked here"


def test_what_a_served_engine_loads(tmp_path: Path) -> None:
    done = run(tmp_path, program=SERVED)
    assert done.stdout == "loaded\n", done.stderr
