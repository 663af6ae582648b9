"""A run, and a server that speaks each provider's protocol on a socket of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from model_servers import APIS, KEY, Api, ApiServer, serving

from patcher.runs.run import Run


@pytest.fixture(params=list(APIS))
def api(request: pytest.FixtureRequest) -> Api:
    return APIS[request.param]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ApiServer]:
    monkeypatch.setenv("PATCHER_HOME", str(tmp_path / "home"))
    with serving() as found:
        for name, path in (("ANTHROPIC", ""), ("OPENAI", "/v1")):
            monkeypatch.setenv(f"{name}_API_KEY", KEY)
            monkeypatch.setenv(f"{name}_BASE_URL", found.url + path)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield found


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with Run.create(tmp_path / "runs", command="optimize") as found:
        yield found
