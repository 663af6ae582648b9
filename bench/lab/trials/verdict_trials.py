"""Do verdicts hold on this machine?

`python -m patcher.bench.lab.trials.verdict_trials OUT`, on a GPU host.

Six processes of vLLM or more stay loaded beside each other, idle but for the one that has its turn.
From them come: at least 20 verdicts of A against A (`--patch`: of a patch), verdicts on a planted
gain (a delay of known size in the baseline's decode steps), and the spread of repeats. What a trial
is: `trial.py`. All of it lies in OUT as it is taken; `--seconds` ends a call in time, and the same
command goes on from there. Exit code 0: all taken, nothing accepted that is not there and every
planted gain found; 1: all taken, and not so; 4: time is up, run it again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import JsonValue

from patcher.ab import arm_protocol as say
from patcher.ab.arm_process import LOAD_S, ArmProcess
from patcher.bench import BudgetError, PatcherError, Workload, preset
from patcher.bench.lab.trials.driver import Driver, StartProcess
from patcher.bench.lab.trials.folder import Folder, TrialsRequest
from patcher.bench.lab.trials.trial import Resident, TrialsSummary
from patcher.integrate import Patch

KV_GIB = 3.0
"""For each engine. Said, and not found by vLLM: while it looks, nothing else may take memory of
the device, and so processes could not load side by side."""


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    try:
        patch = Patch.load(given.patch) if given.patch else None
        asked = asked_of(given, patch)
        driver = Driver(Folder(given.out, asked), given.seconds, starter(asked, patch))
        if given.plan:
            print("\n".join(driver.plan()))
            return 0
        driver.run()
        summary = driver.folder.summary()
        print((given.out / "summary.json").read_text(), end="")
        print((given.out / "summary.md").read_text(), end="")
        if any(driver.folder.left().values()):
            raise BudgetError(
                f"{given.seconds:.0f} seconds are up; left: {driver.folder.left()}",
                "run the same command again",
            )
        return int(not as_it_should(summary))
    except PatcherError as error:
        print(f"{error.kind}: {error.message}\nnext: {error.hint}", file=sys.stderr)
        return error.exit_code


def as_it_should(summary: TrialsSummary) -> bool:
    """Nothing accepted that is not there, every planted gain found. A/A trials of which none gave a
    verdict show nothing.
    """
    aa, planted = summary.kinds.get("aa"), summary.kinds.get("planted")
    return (aa is None or (aa.trials > 0 and not aa.verdicts["accept"])) and (
        planted is None or planted.verdicts["accept"] == planted.trials + planted.unusable
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="patcher.bench.lab.trials.verdict_trials",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python -m patcher.bench.lab.trials.verdict_trials out --seconds 540",
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--plan", action="store_true", help="print what it takes; run nothing")
    parser.add_argument("--seconds", type=float, default=540.0, help="of this call, at most")
    parser.add_argument("--patch", type=Path, help="a bundle; half of the processes have it in")
    parser.add_argument("--model", default="gpt-oss-20b")
    parser.add_argument("--engine", default="vllm", choices=("vllm", "transformers"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=32, help="decode steps a window")
    parser.add_argument(
        "--processes",
        type=int,
        default=6,
        help="loaded at once, at least 6; two make a process pair",
    )
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=3, help="of windows in a process pair")
    parser.add_argument("--planted", type=int, default=4, help="trials of a planted gain")
    parser.add_argument("--planted-pairs", type=int, help="likewise, of those; default: --pairs")
    parser.add_argument("--gain-pct", type=float, default=1.0, help="what is planted")
    parser.add_argument("--repeats", type=int, default=7, help="0: no CV")
    parser.add_argument("--repeat-steps", type=int, default=128)
    parser.add_argument("--margin-pct", type=float, default=0.5)
    parser.add_argument("--kv-gib", type=float, default=KV_GIB, help="vllm: of each process")
    parser.add_argument("--engine-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def asked_of(given: argparse.Namespace, patch: Patch | None) -> TrialsRequest:
    """Raises:
    UsageError: unknown model, or no NAME=VALUE.
    """
    engine: dict[str, JsonValue] = {}
    if given.engine == "vllm":
        engine["kv_cache_memory_bytes"] = round(given.kv_gib * 2**30)
    if given.engine_arg:
        # with it comes what reads profiles, which a GPU host may lack
        from patcher.ab.options import argument

        engine |= dict(map(argument, given.engine_arg))
    return TrialsRequest(
        workload=Workload(
            model=given.model,
            engine=given.engine,
            device=given.device,
            dtype=preset(given.model).dtype,
            batch=given.batch,
            input_len=given.input_len,
            output_len=given.output_len,
            threads=given.threads,
        ),
        arguments=engine,
        patch=patch.digest if patch else None,
        processes=given.processes,
        trials=given.trials,
        pairs=given.pairs,
        planted=given.planted,
        planted_pairs=given.pairs if given.planted_pairs is None else given.planted_pairs,
        gain_pct=given.gain_pct,
        repeats=given.repeats,
        repeat_steps=given.repeat_steps,
        margin_pct=given.margin_pct,
        seed=given.seed,
    )


def starter(asked: TrialsRequest, patch: Patch | None) -> StartProcess:
    """Starts real processes, each as an arm of `patcher throughput`."""

    def start(number: int, patched: bool, seconds: float) -> Resident:
        load = say.Load(
            workload=asked.workload,
            arguments=asked.arguments,
            # with its cache's size said, vLLM only looks whether so much is free now
            memory_share=0.9 / asked.processes,
        )
        patches = (patch,) if patched and patch is not None else ()
        return ArmProcess(f"process {number}", load, patches, min(seconds, LOAD_S))

    return start


if __name__ == "__main__":
    sys.exit(main())
