"""The kernel that stands in front of a call and writes late; what it finds out needs a GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from patcher.bench.runner import late_writer
from patcher.bench.runner.driver import CudaError


def test_its_instructions_assemble(tmp_path: Path) -> None:
    assembler = shutil.which("ptxas") or shutil.which("ptxas", path="/usr/local/cuda/bin")
    if assembler is None:
        pytest.skip("no ptxas here")
    source = tmp_path / "late.ptx"
    source.write_bytes(late_writer._PTX)
    command = [assembler, "-arch=sm_90", str(source), "-o", str(tmp_path / "late.cubin")]
    subprocess.run(command, check=True, capture_output=True)
    wrong = late_writer._PTX.replace(b"launch_dependents", b"launch_nobody")
    source.write_bytes(wrong)
    assert subprocess.run(command, capture_output=True).returncode != 0


def test_no_driver_is_said() -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("a driver is here")
    with pytest.raises(CudaError, match="no driver: "):
        late_writer.LateWriter()
