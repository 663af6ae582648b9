"""Test vLLM's patch points on a GPU: `python -m patcher.bench.lab.vllm_points OUT [BUNDLE...]`.

For each point and mode it checks:

- calls per step by the receipts, against launches by nsys of the new and of the engine's kernels;
- the fallback on a shape that the guards reject;
- equal greedy tokens after the patch was reverted;
- a worker that was restarted;
- A/A: the dispatcher with the engine's own kernel.

All patches are in together, since a start of vLLM takes most of a minute. Without a BUNDLE they are
made of the ops' Triton kernels, judged here; `--ops` selects fewer. Each run is a process and
writes a file to OUT, which a second call reuses. `summary.json` is written at the end. `--jobs 3`
runs three processes at once, each with its part of `--memory-share`. Only A/A is timed, and it runs
alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from patcher.bench import AxisGuard, Candidate, Op, Outcome, PatcherError, Workload, load_op, preset
from patcher.bench.lab.vllm_cases import CASES, check, counted, kernel_names, of_patch
from patcher.bench.machine.environment import engine_environment
from patcher.hotspot import NSYS_OPTIONS, find_nsys, nsys_environment, read
from patcher.integrate import Patch, patch_environment, read_receipts, unpacked
from patcher.integrate.patch import MANIFEST

MODES = ("full", "piecewise", "eager")
MODEL = "gpt-oss-20b"
TIMEOUT_S = 900
OWN_ROUNDS = 3
"""Pairs of processes of the A/A comparison, with alternating order of arms."""
MEMORY_SHARE = 0.8
"""Share of the GPU's memory for all concurrent processes together."""
OF_SEVERAL = ("reduce_add_rms_norm", "qkv_rope_kv_update", "add_rms_norm_route", "moe_block")
"""Ops that compute what others do, and would leave those unused."""
TOGETHER = tuple(op for op in CASES if op not in OF_SEVERAL)
"""Ops that can be patched together."""
WINDOWS = 8
"""Windows of an A/A process; the first is left out."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="patcher.bench.lab.vllm_points")
    parser.add_argument("out", type=Path)
    parser.add_argument("bundles", type=Path, nargs="*", help="patches as they are")
    parser.add_argument("--ops", default=",".join(TOGETHER), help=f"of {', '.join(CASES)}")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--memory-share", type=float, default=MEMORY_SHARE, help="of the GPU's")
    parser.add_argument("--no-own", action="store_true", help="skip the A/A comparison")
    arguments = parser.parse_args()
    workload = Workload(
        model=MODEL,
        engine="vllm",
        device="cuda",
        dtype="bfloat16",
        batch=arguments.batch,
        input_len=128,
        output_len=256,
    )
    proof = PointProof(
        arguments.out, workload, arguments.steps, arguments.jobs, arguments.memory_share
    )
    checks: list[dict[str, Any]] = []
    try:
        with ExitStack() as kept:
            if arguments.bundles:
                given = [Patch.load(kept.enter_context(unpacked(at))) for at in arguments.bundles]
                patches = {patch.manifest.op: patch for patch in given}
            else:
                patches = proof.made(arguments.ops.split(","), checks)
            checks += proof.prove(patches, arguments.modes.split(","))
            if "moe_reduce" in patches and not arguments.no_own:
                checks += proof.own("full")
    except PatcherError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    failed = [one for one in checks if not one["passed"]]
    (arguments.out / "summary.json").write_text(json.dumps(checks, indent=1) + "\n")
    for one in checks:
        print("ok  " if one["passed"] else "FAIL", one["what"], one["seen"])
    return 5 if failed else 0


class PointProof:
    """Performs the runs, with one file each, and evaluates them."""

    def __init__(
        self, out: Path, workload: Workload, steps: int, jobs: int, memory_share: float
    ) -> None:
        self.out, self.workload, self.steps, self.jobs = out, workload, steps, jobs
        self.memory_share = memory_share
        self.layers = preset(workload.model).layers
        out.mkdir(parents=True, exist_ok=True)

    def made(self, ops: Sequence[str], checks: list[dict[str, Any]]) -> dict[str, Patch]:
        """Patches of the ops' Triton kernels; one that the judge does not accept is a failed check
        and is left out.

        Raises:
            PatcherError: none is left.
        """
        patches = {}
        for op in ops:
            try:
                patches[op] = self.bundle(op)
            except PatcherError as error:
                checks.append(check(f"{op}: there is a patch", False, error.message))
        if not patches:
            raise PatcherError(f"there is no patch for any point: {checks[-1]['seen']}")
        return patches

    def prove(self, patches: Mapping[str, Patch], modes: list[str]) -> list[dict[str, Any]]:
        """Run all checks of these patches, by op, which are in together.

        Raises:
            PatcherError: a run failed, or an op has no case.
        """
        if unknown := sorted({*patches} - {*CASES}):
            raise PatcherError(f"no kernel names are known of {', '.join(unknown)}")
        checks = []
        narrow = {
            op: narrowed(patch, self.out / "bundles" / f"{op}-narrow", 1)
            for op, patch in patches.items()
        }
        name, mode = "+".join(patches), modes[0]
        self.together(
            *(partial(self.run, f"stock-{each}", each, profile=True) for each in modes),
            *(
                partial(self.run, f"{name}-{each}", each, [*patches.values()], profile=True)
                for each in modes
            ),
            partial(self.run, f"{name}-{mode}-refused", mode, [*narrow.values()]),
            partial(self.run, f"{name}-{mode}-reverted", mode),
        )
        # the workers are separate processes, which only receipts report
        self.run(f"{name}-{mode}-restarted", mode, [*patches.values()], engines=2)
        for mode in modes:
            stock = self.run(f"stock-{mode}", mode, profile=True)
            patched = self.run(f"{name}-{mode}", mode, [*patches.values()], profile=True)
            launches = [sum(run["kernels"].values()) / self.steps for run in (stock, patched)]
            what = f"{mode}: launches a step, stock and patched"
            checks.append(check(what, launches[1] < launches[0], launches))
            for op, patch in patches.items():
                counts = of_patch(patched, patch.manifest.id)
                each = patch.calls_per_layer(patches.values()) or 0
                expected = CASES[op].calls_in(mode, each * self.layers)
                names = (kernel_names(patch.candidate()), CASES[op].theirs)
                checks += counted(f"{op}, {mode}", names, stock, counts, self.steps, expected)
        mode = modes[0]
        refused = self.run(f"{name}-{mode}-refused", mode, [*narrow.values()])
        receipts = read_receipts(self.out / f"{name}-{mode}-restarted.receipts")
        for op, patch in patches.items():
            counts = of_patch(refused, narrow[op].manifest.id)
            some, calls = sum(counts["fallbacks"].values()), sum(counts["calls"].values())
            label = f"{op}, {mode}: "
            checks.append(check(f"{label}falls back where its guards refuse", some > 0, some))
            checks.append(check(f"{label}and is not called there", calls == 0, calls))
            own = [one for one in receipts if one.patch_id == patch.manifest.id]
            per_worker = sorted(one.total_calls for one in own if one.calls)
            what = f"{label}runs in both of two workers, one started after the other"
            checks.append(check(what, len(per_worker) == 2, per_worker))
        stock = self.run(f"stock-{mode}", mode, profile=True)
        reverted = self.run(f"{name}-{mode}-reverted", mode)
        same = reverted["tokens"] == stock["tokens"]
        return [*checks, check(f"{mode}: reverted, the same greedy tokens", same, same)]

    def together(self, *runs: Callable[[], object]) -> None:
        """Perform runs, `jobs` at a time.

        A batch ends before the next begins, since vLLM refuses to start while another process
        releases memory.

        Raises:
            PatcherError: a run failed, after the others of its batch ended.
        """
        for begin in range(0, len(runs), self.jobs):
            with ThreadPoolExecutor(self.jobs) as pool:
                for done in [pool.submit(run) for run in runs[begin : begin + self.jobs]]:
                    done.result()

    def own(self, mode: str) -> list[dict[str, Any]]:
        """A/A: compare the ratio of medians with the spread between identical processes."""
        rates: dict[bool, list[float]] = {True: [], False: []}
        for index in range(OWN_ROUNDS):
            for own in (True, False) if index % 2 else (False, True):
                name = f"own-{'dispatched' if own else 'stock'}-{mode}-{index}"
                result = self.run(name, mode, own=own, windows=WINDOWS)
                rates[own].append(statistics.median(result["window_s"][1:]))
                if own and not result["calls"].get("own"):
                    return [check(f"A/A, {mode}: the dispatcher ran", False, result["fallbacks"])]
        gain = statistics.median(rates[False]) / statistics.median(rates[True]) - 1
        noise = max(max(each) / min(each) - 1 for each in rates.values())
        seen = f"{gain:+.3%} of throughput, equal processes differ by up to {noise:.3%}"
        return [check(f"A/A, {mode}: less than the noise", abs(gain) < noise, seen)]

    def bundle(self, name: str) -> Patch:
        """Evaluate the shipped Triton kernel of an op and package it as a patch.

        Raises:
            PatcherError: the kernel did not pass.
        """
        folder = self.out / "bundles" / name
        if folder.is_dir():
            return Patch.load(folder)
        op = load_op(name)
        return Patch.create(
            folder,
            op,
            shipped(op),
            self.judged(op),
            engine="vllm",
            made_by="patcher.bench.lab.vllm_points",
        )

    def judged(self, op: Op) -> Any:
        """Evaluate against the accuracy baseline, since speed does not matter here."""
        from patcher.bench import Evaluation, judge

        path = self.out / f"{op.name}.evaluation.json"
        if not path.is_file():
            # few calls, since an input set of the expert matmuls is 0.3 GB
            settings = judge.JudgeSettings(
                device="cuda", baseline="honest", points=2, pairs=6, calls=100
            )
            evaluation = judge.evaluate(shipped(op), settings)
            if evaluation.outcome is not Outcome.CORRECT:
                raise PatcherError(f"the judge says of {op.name}: {evaluation.outcome}")
            path.write_text(evaluation.model_dump_json(indent=1) + "\n")
        return Evaluation.model_validate_json(path.read_text())

    def run(
        self,
        name: str,
        mode: str,
        patches: Sequence[Patch] = (),
        *,
        profile: bool = False,
        own: bool = False,
        engines: int = 1,
        windows: int = 1,
    ) -> dict[str, Any]:
        """Run one process, or read its earlier result.

        A profiled run also has `kernels`, the launches by kernel name.

        Raises:
            PatcherError: the process failed; the message holds its last lines.
        """
        path = self.out / f"{name}.json"
        if path.is_file():
            result: dict[str, Any] = json.loads(path.read_text())
            return result
        raw = self.out / f"{name}.run.json"
        plan = {
            "workload": json.loads(self.workload.model_dump_json()),
            "mode": mode,
            "out": str(raw),
            "steps": self.steps,
            "windows": windows,
            "own": own,
            "engines": engines,
            "memory_share": self.memory_share / (1 if own else self.jobs),
        }
        command = [sys.executable, "-P", "-m", "patcher.integrate.vllm.run", json.dumps(plan)]
        environment = nsys_environment() if profile else engine_environment()
        environment |= self.switches(name, patches)
        report = self.out / f"{name}.nsys-rep"
        if profile:
            nsys = find_nsys()
            if nsys is None:
                raise PatcherError("nsys was not found; see `patcher doctor`")
            command = [str(nsys), "profile", *NSYS_OPTIONS, "-o", str(report), *command]
        print(name, flush=True)
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        (self.out / f"{name}.log").write_text(done.stdout + done.stderr)
        if not raw.is_file():
            raise PatcherError(f"{name} failed, see its log: {done.stderr.strip()[-1500:]}")
        result = json.loads(raw.read_text())
        if profile:
            result["kernels"] = {
                kernel.name: kernel.instances
                for kernel in read(report, MODEL, steps=self.steps, window="all").kernels
            }
        path.write_text(json.dumps(result) + "\n")
        return result

    def switches(self, name: str, patches: Sequence[Patch]) -> dict[str, str]:
        """Environment variables that enable patches, from a separate store for each run."""
        if not patches:
            return {"PATCHER_PATCHES": "off"}
        home, receipts = (self.out / f"{name}.{kind}" for kind in ("home", "receipts"))
        for left in (home, receipts):
            if left.exists():  # of a run that was cut off
                shutil.rmtree(left)
        on = patch_environment(patches, home, receipts)
        return on | {"PATCHER_STRICT": "0"}  # a patch that a mode leaves idle is a failed check


def shipped(op: Op) -> Candidate:
    """The op's shipped Triton kernel.

    Raises:
        PatcherError: the op has none.
    """
    for info, candidate in op.solutions():
        if info.language == "triton":
            return candidate
    raise PatcherError(f"{op.name} has no Triton kernel in its folder")


def narrowed(patch: Patch, folder: Path, widest: int) -> Patch:
    """A copy of a patch, whose guards take at most `widest` tokens."""
    if folder.exists():
        shutil.rmtree(folder)
    shutil.copytree(patch.folder, folder)
    guards = patch.manifest.guards
    axes = {**guards.axes, "tokens": AxisGuard(maximum=widest)}
    fewer = {"guards": guards.model_copy(update={"axes": axes, "shapes": ()})}
    text = patch.manifest.model_copy(update=fewer).model_dump_json(indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
    return Patch.load(folder)


if __name__ == "__main__":
    sys.exit(main())
