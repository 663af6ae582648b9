"""`make vllm-models`: which role of which model is proven in vLLM, on a CPU and without its build.

It writes `tests/data/vllm-models.json`, which `make models` reads. The newest version whose sources
were read is run in a process of its own, as `make engines` runs it; see `vllm_whole`. Names of
models as arguments: those alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.version import Version
from vllm_trees import ROOT, python_path

from patcher.bench import PatcherError
from patcher.integrate.vllm.sources import versions_read

DATA = ROOT / "tests" / "data" / "vllm-models.json"
VERSION = max(versions_read(), key=Version)
_HERE = "--here"


def known() -> dict[str, Any]:
    """The file: a version of vLLM, and the calls of a step by patch point, of each architecture and
    way to quantise its weights."""
    found: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return found


def weights_of(config: Mapping[str, Any]) -> str:
    """How a config.json says that weights are quantised; empty if they are not."""
    return str(config.get("quantization_config", {}).get("quant_method", ""))


def _write(only: list[str]) -> None:
    """Run in the process that can import vLLM; of some models alone, the others stay."""
    __import__("vllm_doubles")
    from vllm_whole import TRIED, proven, world

    calls = known()["calls"] if only else {}
    with world(), tempfile.TemporaryDirectory() as folder:
        for name in only or TRIED:
            calls[name] = proven(name, Path(folder))
            print(name, len(calls[name]), flush=True)
    rows = (f"  {json.dumps(name)}: {json.dumps(calls[name])}" for name in TRIED if name in calls)
    text = ",\n".join(rows)
    head = f'{{"vllm": {json.dumps(VERSION)}, "calls": {{'
    DATA.write_text(f"{head}\n{text}\n}}}}\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    if arguments[:1] == [_HERE]:
        _write(arguments[1:])
        return 0
    try:
        environment = {**os.environ, "PYTHONPATH": python_path(VERSION)}
    except PatcherError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    command = [sys.executable, "-P", __file__, _HERE, *arguments]
    return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
