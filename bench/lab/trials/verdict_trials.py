"""Test the verdicts of this machine with trials whose correct verdict is known.

`python -m patcher.bench.lab.trials.verdict_trials OUT`, on a GPU host.

At least six processes of vLLM stay loaded, and only one works at a time. They give at least 20 A/A
verdicts (with `--patch`, verdicts on a patch), verdicts on a planted gain (a known delay in the
baseline's decode steps), and the spread of repeats. `trial.py` defines a trial. Results are stored
in OUT as they are taken. `--seconds` limits a call, and the same command continues from there.

Exit code 0: all trials are done, no A/A trial was accepted, and every planted gain was; 1: all
trials are done, and a verdict was wrong; 4: the time is up, run the command again.
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
from patcher.bench.lab.trials.folder import Folder, TrialOptions
from patcher.bench.lab.trials.trial import Resident, TrialsSummary
from patcher.integrate import Patch

KV_GIB = 3.0
"""KV cache of each engine in GiB. It is fixed, since vLLM would otherwise measure free memory, and
processes could not load concurrently."""


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    try:
        patch = Patch.load(given.patch) if given.patch else None
        options = trial_options(given, patch)
        driver = Driver(Folder(given.out, options), given.seconds, starter(options, patch))
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
    """Whether no A/A trial was accepted, at least one gave a verdict, and every planted gain was
    accepted.
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
    parser.add_argument("--plan", action="store_true", help="print the estimated time and exit")
    parser.add_argument("--seconds", type=float, default=540.0, help="time limit of this call")
    parser.add_argument("--patch", type=Path, help="a bundle for half of the processes")
    parser.add_argument("--model", default="gpt-oss-20b")
    parser.add_argument("--engine", default="vllm", choices=("vllm", "transformers"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=32, help="decode steps per window")
    parser.add_argument(
        "--processes",
        type=int,
        default=6,
        help="number of loaded processes, at least 6; two make a process pair",
    )
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=3, help="pairs of windows per process pair")
    parser.add_argument("--planted", type=int, default=4, help="trials with a planted gain")
    parser.add_argument("--planted-pairs", type=int, help="--pairs of those; default: --pairs")
    parser.add_argument("--gain-pct", type=float, default=1.0, help="planted gain in percent")
    parser.add_argument("--repeats", type=int, default=7, help="windows for the CV; 0: no CV")
    parser.add_argument("--repeat-steps", type=int, default=128)
    parser.add_argument("--margin-pct", type=float, default=0.5)
    parser.add_argument(
        "--kv-gib", type=float, default=KV_GIB, help="vllm: KV cache of each process"
    )
    parser.add_argument("--engine-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def trial_options(given: argparse.Namespace, patch: Patch | None) -> TrialOptions:
    """Convert command-line options.

    Raises:
        UsageError: the model is unknown, or an engine argument is not NAME=VALUE.
    """
    engine: dict[str, JsonValue] = {}
    if given.engine == "vllm":
        engine["kv_cache_memory_bytes"] = round(given.kv_gib * 2**30)
    if given.engine_arg:
        # this module also imports readers of profiles, which a GPU host may lack
        from patcher.ab.options import argument

        engine |= dict(map(argument, given.engine_arg))
    return TrialOptions(
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


def starter(options: TrialOptions, patch: Patch | None) -> StartProcess:
    """A function that starts processes, each as an arm of `patcher throughput`."""

    def start(number: int, patched: bool, seconds: float) -> Resident:
        load = say.Load(
            workload=options.workload,
            arguments=options.arguments,
            # with a fixed cache size, vLLM only checks that this share is free
            memory_share=0.9 / options.processes,
        )
        patches = (patch,) if patched and patch is not None else ()
        return ArmProcess(f"process {number}", load, patches, min(seconds, LOAD_S))

    return start


if __name__ == "__main__":
    sys.exit(main())
