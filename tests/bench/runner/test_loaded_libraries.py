"""Libraries that a process has loaded, found again by the paths that the kernel tells."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LIBRARY = """
extern "C" int cudaDeviceSynchronize() { return 7; }
extern "C" const char* cudaGetErrorString(int) { return "of the double"; }
"""
FIND = """
import ctypes, json, sys
from patcher.bench.runner import images
from patcher.bench.runner.cudart import Cuda
from patcher.bench.runner.driver import CudaError

for path in sys.argv[1:]:
    ctypes.CDLL(path)
try:
    Cuda().synchronize()
except CudaError as error:
    said = str(error)
print(json.dumps([said, images.cupti()._name, images.mapped_files(1 << 30)]))
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_libraries_in_a_folder_with_spaces_are_found(tmp_path: Path) -> None:
    """As in the environment of a checkout whose path has one."""
    folder = tmp_path / "my  checkout (2)" / "lib"
    folder.mkdir(parents=True)
    source, runtime = tmp_path / "double.cpp", folder / "libcudart.so.12"
    source.write_text(LIBRARY)
    subprocess.run(["g++", "-shared", "-fPIC", "-o", runtime, source], check=True)
    profiling = folder / "libcupti.so.12"
    shutil.copy(runtime, profiling)
    ran = subprocess.run(
        [sys.executable, "-P", "-c", FIND, runtime, profiling],
        capture_output=True,
        text=True,
        check=True,
    )
    said, found, mapped = json.loads(ran.stdout)
    assert said == "cudaDeviceSynchronize: of the double (7)"
    assert found == str(profiling)
    assert {str(runtime), str(profiling)} <= set(mapped)
