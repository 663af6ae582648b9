"""Addresses of Ray clusters: what is none, where nothing answers, and other services."""

from __future__ import annotations

import socket
import threading

import pytest

from patcher.bench import MissingError, UsageError
from patcher.judges.ray_address import answering

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'patcher[ray]'")


def test_where_nothing_answers_and_ray_client_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for named in ("127.0.0.1:1", ""):
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
        with pytest.raises(MissingError, match=r"answers at 127\.0\.0\.1:1") as caught:
            answering(named, ray)
        assert "ray start --head" in caught.value.hint
    with pytest.raises(MissingError, match="no Ray cluster answers at a"):
        answering("a..b:6379", ray)
    for named in ("ray://127.0.0.1:10001", ""):
        monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
        with pytest.raises(UsageError, match="does not speak"):
            answering(named, ray)


@pytest.mark.parametrize("reply", [b"HTTP/1.0 400 Bad Request\r\n\r\n", b""])
def test_another_service_is_told_from_a_cluster(reply: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            link, _ = server.accept()
            with link:
                link.recv(1 << 10)
                link.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(MissingError, match=r"what answers at 127\..* is no Ray cluster"):
            answering(f"127.0.0.1:{server.getsockname()[1]}", ray)
        thread.join()


def test_what_is_no_address_is_said() -> None:
    for wrong in ("foo", "127.0.0.1:", "127.0.0.1:\u00b2", "127.0.0.1:99999", " "):
        with pytest.raises(UsageError, match="is no address of a Ray cluster"):
            answering(wrong, ray)
