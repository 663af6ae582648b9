"""A Ray cluster of one node with two CPUs."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

TOKEN = secrets.token_hex(32)
"""One for all clusters of this process: ray keeps the first that it reads."""


@contextmanager
def ray_cluster() -> Iterator[Any]:
    """Ray, joined to a new cluster; the test is skipped where it is not installed."""
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'patcher[ray]'")
    with pytest.MonkeyPatch.context() as patch:  # else ray writes a token into the home folder
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.delenv("RAY_AUTH_MODE")  # ray sets it itself, and it is to be as before
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)
        _start(ray)
        try:
            yield ray
        finally:
            ray.shutdown()


def _start(ray: Any) -> None:
    # a busy machine may not start a node in the 30 s that ray gives it, and of two clusters that
    # start at a time one may take the port that ray chose for the other
    for left in (2, 1, 0):
        try:
            ray.init(
                address="local",
                num_cpus=2,
                include_dashboard=False,
                logging_level="ERROR",
                log_to_driver=False,
            )
            return
        except Exception as error:
            ray.shutdown()
            told = str(error)
            if not left or not ("timed out during startup" in told or "start GCS" in told):
                raise
