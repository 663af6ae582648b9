"""A run whose server fails at random and whose process is killed at random: afterwards its ledger
is held against what the server logged.

`python tests/support/gate_soak.py [CALLS] [KILLS]` does so for both protocols; `test_cost.py` does
it with a few calls.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model_servers import APIS, KEY, Api, Item, Slept, serving

from patcher.bench import PatcherError
from patcher.models import Request
from patcher.models.budget import Budget
from patcher.models.ceilings import account
from patcher.models.client import ModelClient
from patcher.runs.run import Run

LIES = (-5, 0, 10**18, None, 0.5, "few")


@dataclass
class Log:
    """What the server truly used."""

    counted: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Whole replies with honest counts: tokens of input and output."""
    tokens: int = 0
    """Of everything that the server wrote, whatever became of it."""


class Script(list[Item]):
    """Answers without an end, some of them faulty, each noted in the log."""

    def __init__(self, rng: random.Random, api: Api, log: Log) -> None:
        super().__init__()
        self.rng, self.api, self.log = rng, api, log

    def pop(self, index: Any = -1) -> Item:
        """The next answer."""
        rng, api = self.rng, self.api
        counts = rng.randrange(200, 900), rng.randrange(1, 4000)
        whole = api.events("Hello", "end_turn", counts)
        kind = rng.randrange(8)
        if kind == 0:
            return api.failure(rng.choice((429, 500, 529)), "api_error")
        self.log.tokens += sum(counts)
        if kind == 1:
            return Item(b"".join(whole[: rng.randrange(1, 4)]), then="reset")
        if kind == 2:
            lie = rng.choice(LIES)
            return Item(b"".join(api.events("Hello", "end_turn", (lie, lie))))
        if kind == 3:
            return Item(b"".join(reversed(whole)))
        self.log.counted[counts] += 1
        return Item(b"".join(whole))


def soak(name: str, folder: Path, calls: int, kills: int) -> str:
    """Ask so many questions of a faulty server and kill the asking process so many times.

    Returns:
        What came of it, in a sentence.
    """
    rng, api, log = random.Random(7), APIS[name], Log()
    left = kills
    with Run.create(folder, command="optimize") as run:
        path = run.path
    with serving() as server:
        server.script = Script(rng, api, log)
        while True:
            life = _life(server.url, path, name, calls)
            until = len(server.seen) + rng.randrange(5, max(6, 2 * calls // (kills + 1)))
            while life.poll() is None and not (left and len(server.seen) >= until):
                try:
                    life.wait(0.01)
                except subprocess.TimeoutExpired:
                    continue
            if life.poll() is not None:
                break
            life.send_signal(signal.SIGKILL)
            life.wait()
            left -= 1
        asked = len(server.seen)
    assert life.returncode == 0
    with Run.open(path, read_only=True) as run:
        found = account(run.events)
    assert not found.reserved
    assert found.ledger.calls == calls
    booked = Counter(
        (call.input_tokens, call.output_tokens) for call in found.calls if call.input_tokens
    )
    assert booked <= log.counted, booked - log.counted
    used = sum(sum(counts) * times for counts, times in booked.items())
    assert found.used.tokens == used
    assert found.unknown.tokens >= log.tokens - used
    return (
        f"{name}: {calls:,} calls, {asked:,} requests, {kills - left} kills; the server used "
        f"{log.tokens:,} tokens: {used:,} are booked as used, reply by reply as it logged them, "
        f"and {found.unknown.tokens:,} as unknown for the other {log.tokens - used:,}"
    )


def _life(url: str, run_dir: Path, name: str, calls: int) -> subprocess.Popen[bytes]:
    """A process that goes on with the run's questions."""
    env = {"PATH": os.environ["PATH"], "NO_PROXY": "127.0.0.1"}
    for each, tail in (("ANTHROPIC", ""), ("OPENAI", "/v1")):
        env |= {f"{each}_API_KEY": KEY, f"{each}_BASE_URL": url + tail}
    words = [sys.executable, __file__, "--live", str(run_dir), name, str(calls)]
    return subprocess.Popen(words, env=env)


def _live(run_dir: Path, name: str, calls: int) -> None:
    """Ask each question once; one without an answer is asked again."""
    with Run.open(run_dir) as run:
        client = ModelClient(Budget(run), clock=Slept().clock)
        model = APIS[name].open(None)
        for number in range(calls):
            question = Request(
                step=f"op/{number}/ask-generate",
                role="generate",
                system="s",
                prompt="Write. " * 100,
                max_tokens=4000,
            )
            while True:
                try:
                    client.ask(model, question)
                    break
                except PatcherError:
                    continue


def main() -> None:
    """Both protocols."""
    calls, kills = (int(each) for each in [*sys.argv[1:], *("1000", "40")[len(sys.argv) - 1 :]])
    for name in APIS:
        with tempfile.TemporaryDirectory() as folder:
            print(soak(name, Path(folder), calls, kills), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--live"]:
        _live(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        main()
