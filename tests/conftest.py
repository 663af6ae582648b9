"""What every test shares: no test touches what this user's own runs learned or applied."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _a_home_of_their_own() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as home, pytest.MonkeyPatch.context() as patched:
        if "PATCHER_HOME" not in os.environ:
            patched.setenv("PATCHER_HOME", home)
        yield
