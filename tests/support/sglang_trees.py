"""`make engines`: the tests of SGLang's patch points and engine against its real Python, on a CPU.

As for vLLM (`vllm_trees`), whose folder and dependencies it shares: a version's wheel is downloaded
without its dependencies, its Python is unpacked, and `sglang_doubles` stands for the rest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import vllm_trees

from patcher.bench import PatcherError
from patcher.integrate.sglang.sources import RECORD

ROOT = Path(__file__).resolve().parents[2]
TESTS = (
    "tests/integrate/sglang",
    "tests/bench/engines/test_sglang_engine.py",
    "tests/patcher/ab/test_served_client.py",
)
DEPENDENCIES = ROOT / "tests" / "data" / "sglang-dependencies.txt"
FILES = (".py", ".json", ".cuh", ".h")
"""SGLang looks for the folders of its headers when it is imported."""


def python_path(version: str) -> str:
    """The `PYTHONPATH` under which a version is imported; `sglang_doubles` must come first.

    Raises:
        MissingError: pip does not get what is missing.
    """
    place = vllm_trees.folder() / f"sglang-{version}"
    tree = vllm_trees.unpacked("sglang", version, place, FILES)
    more = vllm_trees.installed(DEPENDENCIES)
    support = ROOT / "tests" / "support"
    return os.pathsep.join(map(str, (tree, more, vllm_trees.dependencies(), support)))


def main(arguments: list[str]) -> int:
    """Run every version that was read; the arguments are for pytest."""
    failed = []
    try:
        for version in RECORD.versions_read():
            print(f"\nSGLang {version}", flush=True)
            command = [sys.executable, "-m", "pytest", "-q", "-p", "sglang_doubles", *TESTS]
            environment = {**os.environ, "PYTHONPATH": python_path(version)}
            done = subprocess.run([*command, *arguments], cwd=ROOT, env=environment)
            failed += [version] if done.returncode else []
    except PatcherError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"\nfailed: {', '.join(failed)}" if failed else "\npassed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
