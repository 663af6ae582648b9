"""Serve for a long time under mixed traffic, stock and patched: `python -m
patcher.bench.lab.vllm_soak OUT BUNDLE...`, on a GPU host.

Both servers run on one GPU at the same time, each with a share of its memory. In each round both
get the same: a run of `vllm bench serve` with another trace and concurrency, requests whose client
goes away, every third round a sleep and a wake-up, and the same few prompts alone, whose tokens and
log-probabilities must be those of the first round, bit for bit. With `--lora` every second run,
half of the requests that are left and half of the probes have a LoRA adapter, and nothing sleeps.
OUT/soak.jsonl has a line a round; OUT/soak.json the table: memory of GPU and host and how it grew,
drift, and calls by patch so far.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import JsonValue

from patcher.ab.bench_client import BenchClient
from patcher.ab.served_records import ServedJob, SideSetup
from patcher.ab.server import HOST, EngineServer, free_port, installation, server_environment
from patcher.bench import PatcherError, Workload, parse_json
from patcher.bench.ab.served import ServedPoint, TraceRequest, requests_of, traces
from patcher.bench.engines.architecture import full_config
from patcher.bench.engines.served_prompts import ServedPrompts
from patcher.bench.engines.serving import client_of, filled, request_line
from patcher.bench.lab.lora_adapter import RANK, write_adapter
from patcher.bench.lab.process_memory import gpu_mib, host_mib
from patcher.bench.machine.clocks import ClockMonitor
from patcher.bench.sandbox.process_tree import descendants
from patcher.integrate import Patch, read_receipts, unpacked

MODEL = "gpt-oss-20b"
TRAFFIC = (("fixed", 1), ("mixed", 16), ("fixed", 8), ("mixed", 32), ("fixed", 64), ("mixed", 4))
"""Traces and concurrencies, in turn."""
ROUND_REQUESTS = 2
"""Requests of a user in one round."""
LEFT_ALONE = 12
"""Requests of a round whose client goes away."""
SLEEP_EVERY = 3
PROBES, PROBE_TOKENS = 4, 32
PROBE_SEED, ABORT_SEED = 990_000, 980_000
SETTLED = 6
"""Rounds until memory is taken as settled: each kind of traffic and a sleep have been there."""
ADAPTER = "random"
"""The name by which requests ask for the LoRA adapter."""


class SoakRound(NamedTuple):
    """What one server showed in one round."""

    probes: list[Any]
    """Tokens and log-probabilities of each probe."""
    gpu_mib: float | None
    """Memory of the GPU that its processes hold; None if the driver does not say by process."""
    host_mib: float
    """Memory of the host that its processes hold alone."""
    calls: dict[str, dict[str, int]]
    """By patch so far: calls, fallbacks and layers that took it."""


class SoakedServer:
    """One server, with the client that drives it."""

    def __init__(
        self,
        job: ServedJob,
        side: SideSetup,
        prompts: ServedPrompts,
        kept: ExitStack,
        lora: bool,
    ) -> None:
        self.arm, self.job, self.lora = side.name, job, lora
        arm = side.name
        self.folder = Path(kept.enter_context(tempfile.TemporaryDirectory(prefix=f"soak-{arm}-")))
        self.prompts = prompts
        port = free_port()
        self.values = {**job.values(self.prompts), "port": port, "folder": self.folder}
        found = installation(job.serving, side.python)
        variables = server_environment(
            job.serving, side.python, found.plugin, self.folder / "plugin"
        )
        variables |= {**job.serving.random_environment, "VLLM_SERVER_DEV_MODE": "1"}
        # a patch that is idle for a time is seen in the table
        variables |= {**side.environment(self.folder), "PATCHER_STRICT": "0"}
        command = job.serve_command(side, self.values)
        self.client = kept.enter_context(
            BenchClient(job.serving, job.client, side.python, self.folder)
        )
        self.server = kept.enter_context(
            EngineServer(arm, command, variables, self.folder, port, job.serving.health)
        )
        self.clocks = kept.enter_context(ClockMonitor(job.workload.device))

    def round(self, index: int) -> SoakRound:
        """Traffic, requests that are left alone, perhaps a sleep, then the probes."""
        self._drive(index)
        self._leave_alone(index)
        if not self.lora and index % SLEEP_EVERY == SLEEP_EVERY - 1:
            self._post("/sleep?level=1")
            self._post("/wake_up")
        self._post("/reset_prefix_cache")
        asked = self._requests("fixed", PROBES, PROBE_SEED)
        probes = [self._probe(request, number) for number, request in enumerate(asked)]
        time.sleep(1.5)  # receipts are written once a second
        pids = descendants(self.server.pid)
        return SoakRound(probes, gpu_mib(pids), host_mib(pids), self._calls())

    def _drive(self, index: int) -> None:
        name, users = TRAFFIC[index % len(TRAFFIC)]
        requests = self._requests(name, ROUND_REQUESTS * users, 1000 * (index + 1))
        file, result = self.folder / "requests.jsonl", self.folder / "result.json"
        with file.open("w", encoding="utf-8") as lines:
            for request in requests:
                answer = self.prompts.text(self.prompts.vocabulary[: request.output_len])
                prompt = self.prompts.text(request.prompt)
                line = request_line(self.job.serving.request, prompt, answer, request.output_len)
                lines.write(line + "\n")
        more = {"requests": file, "count": len(requests), "concurrency": users, "run": index}
        words = filled(self.job.serving.bench, {**self.values, **more, "result": result.name})
        if self._adapted(index):
            words += ["--lora-modules", ADAPTER]
        self.client.run(words, self.server, self.clocks)

    def _leave_alone(self, index: int) -> None:
        """Begin to read streams and close their connections."""

        def leave(number: int, request: TraceRequest) -> None:
            answer, connection = self._ask(request, number, stream=True)
            answer.read(256)
            connection.close()

        asked = self._requests("mixed", LEFT_ALONE, ABORT_SEED + index)
        with ThreadPoolExecutor(LEFT_ALONE) as pool:
            list(pool.map(leave, range(len(asked)), asked))

    def _adapted(self, number: int) -> bool:
        return self.lora and number % 2 == 1

    def _probe(self, request: TraceRequest, number: int) -> Any:
        short = TraceRequest(request.prompt, PROBE_TOKENS)
        answer, connection = self._ask(short, number, logprobs=1)
        found = parse_json(answer.read().decode())
        connection.close()
        [choice] = found["choices"]
        return [choice["text"], (choice.get("logprobs") or {}).get("token_logprobs")]

    def _requests(self, trace: str, count: int, seed: int) -> list[TraceRequest]:
        return requests_of(traces()[trace], count, self.prompts.vocabulary, seed)

    def _ask(
        self, request: TraceRequest, number: int, **more: Any
    ) -> tuple[http.client.HTTPResponse, http.client.HTTPConnection]:
        body = {
            "model": ADAPTER if self._adapted(number) else self.prompts.model,
            "prompt": self.prompts.text(request.prompt),
            "max_tokens": request.output_len,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }
        return self._send("/v1/completions", json.dumps(body))

    def _post(self, path: str) -> None:
        answer, connection = self._send(path, "")
        answer.read()
        connection.close()

    def _send(
        self, path: str, body: str
    ) -> tuple[http.client.HTTPResponse, http.client.HTTPConnection]:
        connection = http.client.HTTPConnection(HOST, self.values["port"], timeout=300)
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            said = answer.read()[:300].decode("utf-8", "replace")
            raise PatcherError(
                f"the {self.arm} server answered {path} with {answer.status}: {said}"
            )
        return answer, connection

    def _calls(self) -> dict[str, dict[str, int]]:
        return {
            one.patch_id: {
                "calls": one.total_calls,
                "fallbacks": sum(one.fallbacks.values()),
                "layers": one.layers_taken or 0,
            }
            for one in read_receipts(self.folder / "receipts")
        }


def started(
    job: ServedJob, sides: Sequence[SideSetup], lora: bool, kept: ExitStack
) -> list[SoakedServer]:
    """A server of each side, which load at the same time; leaving `kept` ends them.

    Raises:
        PatcherError: one did not start, after the others have.
    """
    # a process ends with the thread that started it, so that the threads live as long as `kept`
    pool = kept.enter_context(ThreadPoolExecutor(len(sides)))
    stacks = [kept.enter_context(ExitStack()) for _ in sides]
    # made once, since it imports what two threads must not import at a time
    prompts = ServedPrompts(job.workload)
    servers = [
        pool.submit(SoakedServer, job, side, prompts, stack, lora)
        for side, stack in zip(sides, stacks, strict=True)
    ]
    return [server.result() for server in servers]


def soak(arms: Sequence[SoakedServer], minutes: float, record: Path) -> list[dict[str, SoakRound]]:
    """Rounds until the time is over; a line of each and the table so far are written at once."""
    deadline, rounds = time.monotonic() + 60 * minutes, list[dict[str, SoakRound]]()
    with ThreadPoolExecutor(len(arms)) as pool, record.open("w", encoding="utf-8") as lines:
        while time.monotonic() < deadline:
            index = len(rounds)
            running = {arm.arm: pool.submit(arm.round, index) for arm in arms}
            rounds.append({name: each.result() for name, each in running.items()})
            line = {name: each._asdict() for name, each in rounds[-1].items()}
            first = {name: each.probes for name, each in rounds[0].items()}
            for name, one in line.items():
                one["drifted"] = one.pop("probes") != first[name]
            print(json.dumps(line), file=lines, flush=True)
            found = table(rounds) | {"minutes": minutes + (time.monotonic() - deadline) / 60}
            record.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    return rounds


def table(rounds: Sequence[dict[str, SoakRound]]) -> dict[str, Any]:
    """What came of each server."""
    found: dict[str, Any] = {}
    for name in rounds[0]:
        seen = [each[name] for each in rounds]
        drifted = [index for index, one in enumerate(seen) if one.probes != seen[0].probes]
        found[name] = {
            "rounds": len(seen),
            "rounds_with_other_probes": drifted,
            "different_probes": len({json.dumps(one.probes) for one in seen}),
            "gpu_mib": grown([one.gpu_mib for one in seen]),
            "host_mib": grown([one.host_mib for one in seen]),
            "calls": {
                patch: {**counts, **forwards(counts)} for patch, counts in seen[-1].calls.items()
            },
        }
    return found


def forwards(counts: dict[str, int]) -> dict[str, float]:
    """Forwards of the model that the calls of a patch are of: the same for all patches."""
    layers = counts["layers"]
    return {"forwards": (counts["calls"] + counts["fallbacks"]) / layers} if layers else {}


def grown(values: Sequence[float | None]) -> dict[str, float] | None:
    """Memory when it has settled, at the end, and its growth between, as medians over the first
    and the last third of the rounds since then; None if it is not known.
    """
    known = [value for value in values if value is not None][SETTLED:]
    if len(known) < 3:
        return None
    third = len(known) // 3
    begin, end = statistics.median(known[:third]), statistics.median(known[-third:])
    return {"settled": begin, "end": end, "growth": end - begin, "most": max(known)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="patcher.bench.lab.vllm_soak")
    parser.add_argument("out", type=Path)
    parser.add_argument("bundles", type=Path, nargs="*")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--memory-share", type=float, default=0.42, help="of the GPU, a server")
    parser.add_argument("--cache-gib", type=float, default=12, help="KV cache of a server")
    parser.add_argument("--lora", action="store_true", help="with an adapter on and off")
    given = parser.parse_args(arguments)
    out: Path = given.out
    out.mkdir(parents=True, exist_ok=True)
    name, client = client_of(None, "vllm")
    workload = Workload(
        model=MODEL, engine="vllm", device="cuda", dtype="bfloat16", batch=1, input_len=8,
        output_len=8,
    )  # fmt: skip
    points = tuple(ServedPoint(trace=trace, concurrency=users) for trace, users in TRAFFIC)
    job = ServedJob(workload, name, client, points, process_pairs=1)
    # with a cache of a given size vLLM does not measure what is free, so that both start at a time
    switches: dict[str, JsonValue] = {
        "gpu_memory_utilization": given.memory_share,
        "kv_cache_memory_bytes": int(given.cache_gib * 2**30),
    }
    if given.lora:
        adapter = out.resolve() / "adapter"
        write_adapter(adapter, full_config(MODEL))
        switches |= {"enable_lora": True, "max_lora_rank": RANK}
        switches["lora_modules"] = f"{ADAPTER}={adapter}"
    else:
        switches["enable_sleep_mode"] = True
    stock = SideSetup("stock", switches)
    with ExitStack() as kept:
        patches = tuple(Patch.load(kept.enter_context(unpacked(path))) for path in given.bundles)
        sides = (stock, replace(stock, name="patched", patches=patches))
        arms = started(job, sides, given.lora, kept)
        found = table(soak(arms, given.minutes, out / "soak.jsonl"))
    print(json.dumps(found, indent=1))
    drifted = [each for each in ("stock", "patched") if found[each]["rounds_with_other_probes"]]
    return 1 if "patched" in drifted and "stock" not in drifted else 0


if __name__ == "__main__":
    os.environ.setdefault("PATCHER_PATCHES", "off")
    raise SystemExit(main())
