"""The address of a Ray cluster: what it stands for, and whether a cluster answers there."""

from __future__ import annotations

import os
import socket
from typing import Any

from patcher.bench import MissingError, UsageError

AUTO = "auto"
ANSWER_S = 10.0
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""HTTP/2's preface and an empty SETTINGS frame (RFC 9113, section 3.4)."""
_SETTINGS = 4
_HINT = "start one (ray start --head), or name another: --judge ray:HOST:PORT"


def answering(named: str, ray: Any) -> str:
    """The address for `ray.init`: what was named, `RAY_ADDRESS`, or this machine's cluster.

    Raises:
        UsageError: it is no address, or Ray Client's.
        MissingError: no cluster answers there; ray itself would try for minutes.
    """
    address = named or os.environ.get("RAY_ADDRESS", "") or AUTO
    if "://" in address:
        raise UsageError(
            f"{address} is Ray Client's, which patcher does not speak",
            "run patcher on a machine of the cluster: --judge ray:HOST:PORT",
        )
    if address == "local":
        return address
    try:
        at = ray._private.services.canonicalize_bootstrap_address(AUTO) if address == AUTO else ""
    except ConnectionError as error:
        raise MissingError(f"no Ray cluster runs on {name(address)}", _HINT) from error
    host, port = _host_and_port(at or address)
    try:
        found = _answers(host, port)
    except (OSError, UnicodeError) as error:
        raise MissingError(f"no Ray cluster answers at {at or address}", _HINT) from error
    if not found:
        raise MissingError(f"what answers at {at or address} is no Ray cluster", _HINT)
    return address


def require_joined(named: str, joined: str) -> None:
    """Refuse another cluster than the one that this process has joined: it can have but one.

    Raises:
        UsageError: the address that was named is another one's, or none.
    """
    if named in ("", AUTO, "local"):
        return
    host, port = _host_and_port(named)
    at, at_port = _host_and_port(joined)
    ours, theirs = _addresses(host), _addresses(at)
    same = port == at_port and (bool(ours & theirs) or (_here(ours) and _here(theirs)))
    if not same:
        raise UsageError(
            f"this process has joined the Ray cluster at {joined}, not {named}",
            "ask the other cluster from another process",
        )


def answers(address: str) -> bool:
    """Whether a cluster answers there."""
    try:
        return _answers(*_host_and_port(address))
    except OSError:
        return False


def name(address: str) -> str:
    return "this machine" if address == AUTO else address


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise UsageError(f"{address!r} is no address of a Ray cluster", "say --judge ray:HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _answers(host: str, port: int) -> bool:
    """Whether a gRPC server is there, as each Ray cluster has one."""
    with socket.create_connection((host, port), timeout=ANSWER_S) as link:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return True
        link.sendall(_HELLO)
        with link.makefile("rb") as reply:
            head = reply.read(9)
        return len(head) == 9 and head[3] == _SETTINGS


def _addresses(host: str) -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return {host}


def _here(addresses: set[str]) -> bool:
    """Whether one of them is this machine's."""
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            socket.create_server((address, 0), family=family).close()
        except OSError:
            continue
        return True
    return False
