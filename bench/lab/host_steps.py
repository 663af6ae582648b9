"""What the host takes of a decode step at batch 1: `python -m patcher.bench.lab.host_steps OUT
BUNDLE...`, on a GPU host with vLLM.

Each way is a process: stock and patched, with the engine's core in this process, as verdicts have
it, or in one of its own, as `vllm serve` has it. In each window every step is timed, and of all
processes CPU time and switches of context are counted. Steps that take longer than their kernels in
a profile wait for the host. OUT/host_steps.json has a row a window; a second call goes on where a
first ended.

`--beside` asks instead why an engine alone is slower than one beside an idle process, at batch 8,
in one engine: windows alone; later again, for what time alone changes; then beside and after what
may end it, from the least to the most: another process's CUDA context, a second context of this
process with a memory fill in it, and another process's kernel. What ends it lasts, so that the
first that is faster says what is enough. Ratios to the first windows are told, with their range.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from patcher.bench import PatcherError, Workload
from patcher.bench.engines import Decoder
from patcher.bench.lab.logged import run_logged
from patcher.bench.machine.clocks import ClockMonitor
from patcher.bench.sandbox.process_tree import CpuTime, descendants
from patcher.integrate import Patch, await_engine, patch_environment, unpacked

MODEL, STEPS, WINDOWS = "gpt-oss-20b", 256, 8
CORES = {"in-process": True, "own-process": False}
"""Where the engine's core is; see `VllmEngine`."""
TIMEOUT_S = 240
BESIDE = "beside"
ROUNDS = 8
HOLDS = """
import time, torch
torch.cuda.mem_get_info()
{}
print("held", flush=True)
time.sleep(3600)
"""
LAUNCHES = 'torch.zeros(1, device="cuda"); torch.cuda.synchronize()'
ALONE = "alone"


class HostWindow(NamedTuple):
    """One window of decode."""

    step_ms: float
    """Mean of all steps, with the device synchronised at both ends."""
    p10_ms: float
    p50_ms: float
    p90_ms: float
    most_ms: float
    cpu_share: float
    """CPU time of all processes over the window's; several threads may give more than 1."""
    waited_share: float
    """Of the window, how long the main thread was ready and another thread had its CPU."""
    voluntary: int
    """Switches of context of all processes that waited for something."""
    involuntary: int
    """Those in which another thread took the CPU."""


def window(engine: Decoder, seed: int, steps: int) -> HostWindow:
    """Decode one batch, step by step."""
    decoding = engine.prefill(engine.prompts(seed))
    engine.synchronize()
    pids = descendants(os.getpid())
    cpu, switched = CpuTime.of(pids, os.getpid()), switches(pids)
    took, begin = [], time.perf_counter()
    for _ in range(steps):
        step = time.perf_counter()
        engine.decode(decoding, 1)
        took.append(time.perf_counter() - step)
    engine.synchronize()
    whole = time.perf_counter() - begin
    used, waited = CpuTime.of(pids, os.getpid()).since(cpu)
    now = switches(pids)
    engine.release(decoding)
    tenths = [1000 * one for one in statistics.quantiles(took, n=10)]
    return HostWindow(
        step_ms=1000 * whole / steps,
        p10_ms=tenths[0],
        p50_ms=tenths[4],
        p90_ms=tenths[8],
        most_ms=1000 * max(took),
        cpu_share=used / whole,
        waited_share=waited / whole,
        voluntary=now[0] - switched[0],
        involuntary=now[1] - switched[1],
    )


def switches(pids: set[int]) -> tuple[int, int]:
    """Switches of context of all threads of processes: voluntary, and not."""
    found = [0, 0]
    for path in (each for pid in pids for each in Path(f"/proc/{pid}/task").glob("*/status")):
        try:
            lines = path.read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:  # a thread that has just ended
            continue
        said = dict(line.split(":", 1) for line in lines if ":" in line)
        found[0] += int(said.get("voluntary_ctxt_switches", 0))
        found[1] += int(said.get("nonvoluntary_ctxt_switches", 0))
    return found[0], found[1]


def run(out: Path, core: str) -> None:
    """Measure one way in this process."""
    from patcher.bench.engines.vllm import VllmEngine

    await_engine("vllm")
    workload = Workload(
        model=MODEL, engine="vllm", device="cuda", dtype="bfloat16", batch=1, input_len=1024,
        output_len=STEPS,
    )  # fmt: skip
    engine = VllmEngine(workload, {"max_cudagraph_capture_size": 8}, one_process=CORES[core])
    rows = [window(engine, seed, STEPS)._asdict() for seed in range(WINDOWS)]
    out.write_text(json.dumps(rows) + "\n", encoding="utf-8")
    engine.close()


def run_beside(out: Path) -> None:
    """Measure windows alone and beside others in this process; rows say beside what."""
    from patcher.bench.engines.vllm import VllmEngine

    await_engine("vllm")
    workload = Workload(
        model=MODEL, engine="vllm", device="cuda", dtype="bfloat16", batch=8, input_len=1024,
        output_len=STEPS,
    )  # fmt: skip
    engine = VllmEngine(workload, {"max_cudagraph_capture_size": 8}, one_process=True)
    with ClockMonitor("cuda") as clocks:

        def measure(seed: int) -> HostWindow:
            found = window(engine, seed, STEPS)
            samples.append({"clocks": asdict(clocks.sample())})
            return found

        samples = list[dict[str, Any]]()
        rows = [
            row | sample
            for row, sample in zip(beside(measure, NEIGHBOURS), samples[1:], strict=True)
        ]
    out.write_text(json.dumps(rows) + "\n", encoding="utf-8")
    engine.close()


def beside(
    measure: Callable[[int], HostWindow],
    neighbours: Mapping[str, Callable[[], AbstractContextManager[None]]],
    rounds: int = ROUNDS,
) -> list[dict[str, Any]]:
    """Windows alone, later, and beside and after each neighbour. The first window warms up."""
    seeds, rows = itertools.count(), list[dict[str, Any]]()
    measure(next(seeds))

    def windows(when: str) -> None:
        for _ in range(rounds):
            rows.append({"beside": when, **measure(next(seeds))._asdict()})

    windows(ALONE)
    windows(f"{ALONE}, later")
    for name, neighbour in neighbours.items():
        with neighbour():
            windows(name)
        windows(f"after {name}")
    return rows


@contextmanager
def holder(program: str) -> Iterator[None]:
    """A process that says `held` once it holds what it should, until the end."""
    with child(program) as process:
        assert process.stdout is not None
        if process.stdout.readline() != b"held\n":
            raise PatcherError("the process that holds a CUDA context ended")
        yield


@contextmanager
def own_context() -> Iterator[None]:
    """A second CUDA context of this process in which memory was filled once."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: Any) -> None:
        if (code := getattr(cuda, name)(*arguments)) != 0:
            raise PatcherError(f"{name} answered {code}")

    context, memory, size = ctypes.c_void_p(), ctypes.c_uint64(), 1 << 20
    call("cuCtxCreate_v2", ctypes.byref(context), 0, 0)  # it is current from here on
    try:
        call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(size))
        call("cuMemsetD8_v2", memory, 1, ctypes.c_size_t(size))
        call("cuCtxSynchronize")
        call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        yield
    finally:
        call("cuCtxDestroy_v2", context)


NEIGHBOURS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "a context of another process": lambda: holder(HOLDS.format("")),
    "a second context of its own": own_context,
    "a kernel of another process": lambda: holder(HOLDS.format(LAUNCHES)),
}


@contextmanager
def child(program: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that is killed at the end."""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def told_beside(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each neighbour: steps, and how they compare with those alone."""
    by_name: dict[str, list[float]] = {}
    for row in rows:
        by_name.setdefault(row["beside"], []).append(row["step_ms"])
    alone = statistics.median(by_name[ALONE])
    return [
        f"{name:34s} {statistics.median(steps):.3f} ms a step, {min(steps):.3f} to "
        f"{max(steps):.3f}: {100 * (statistics.median(steps) / alone - 1):+.2f} % of that alone"
        for name, steps in by_name.items()
    ]


def start(out: Path, arm: str, core: str, patches: Sequence[Patch]) -> None:
    """Run one way in a process of its own, unless it has run; its log says what went wrong."""
    name = f"{arm}-{core}"
    result = out / f"{name}.json"
    if result.exists():
        return
    variables = patch_environment(patches, out / f"{name}.home", out / f"{name}.receipts")
    variables |= {"PATCHER_STRICT": "0"}
    command = [sys.executable, "-P", "-m", __spec__.name, str(result), "--way", core]
    run_logged(command, variables, out / f"{name}.log", TIMEOUT_S)


def told(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """One way in a line: medians over windows but the first, and their spread."""
    kept = rows[1:] or rows
    middle = {key: statistics.median(row[key] for row in kept) for key in HostWindow._fields}
    steps = [row["step_ms"] for row in kept]
    return (
        f"{name:22s} {middle['step_ms']:.3f} ms a step, {min(steps):.3f} to {max(steps):.3f}; "
        f"p10 {middle['p10_ms']:.3f}, p90 {middle['p90_ms']:.3f}; CPU {middle['cpu_share']:.2f}; "
        f"{middle['voluntary']:,.0f} and {middle['involuntary']:,.0f} switches"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="patcher.bench.lab.host_steps")
    parser.add_argument("out", type=Path)
    parser.add_argument("bundles", type=Path, nargs="*")
    parser.add_argument("--beside", action="store_true", help="why an engine alone is slower")
    parser.add_argument("--way", choices=[*CORES, BESIDE], help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    out: Path = given.out.resolve()
    if given.way:
        run_beside(out) if given.way == BESIDE else run(out, given.way)
        return 0
    out.mkdir(parents=True, exist_ok=True)
    if given.beside:
        start(out, "stock", BESIDE, ())
        result = out / f"stock-{BESIDE}.json"
        if result.exists():
            print(*told_beside(json.loads(result.read_text(encoding="utf-8"))), sep="\n")
        return int(not result.exists())
    found: dict[str, Any] = {}
    missing = 0
    with ExitStack() as kept:
        patches = [Patch.load(kept.enter_context(unpacked(path))) for path in given.bundles]
        for core in CORES:
            for arm in ("stock", "patched") if patches else ("stock",):
                start(out, arm, core, patches if arm == "patched" else ())
                result = out / f"{arm}-{core}.json"
                if not result.exists():
                    print(f"{arm}-{core}: it ended without a result, see its log", flush=True)
                    missing += 1
                    continue
                found[result.stem] = json.loads(result.read_text(encoding="utf-8"))
                print(told(result.stem, found[result.stem]), flush=True)
                text = json.dumps(found, indent=1) + "\n"
                (out / "host_steps.json").write_text(text, encoding="utf-8")
    return int(missing > 0)


if __name__ == "__main__":
    raise SystemExit(main())
