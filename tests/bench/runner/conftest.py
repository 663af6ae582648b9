"""The stand-in for CUDA's driver, built once."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

DOUBLE = Path(__file__).parents[2] / "doubles" / "driver_double.c"


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its library; each module has one of its own, with no memory of another's."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here")
    library = tmp_path_factory.mktemp("double") / "libcuda.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, DOUBLE], check=True)
    return str(library)
