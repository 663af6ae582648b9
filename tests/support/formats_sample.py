"""What the tests of export and import share: an op of each kind, its patches and their truth."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from patcher import bench
from patcher.bench import Candidate, Evaluation, Language, Op, Outcome, Timing
from patcher.integrate import Patch

NORM = "fused_add_rms_norm"
NORM_TORCH = '''"""fused_add_rms_norm in plain PyTorch, in place."""

import torch


def fused_add_rms_norm(input, residual, weight, epsilon):
    residual.add_(input)
    wide = residual.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    input.copy_(weight * (wide * scale))
'''
POINT = """
[[patch_points]]
engine = "transformers"
versions = ">=5.17,<6"
point = "gpt_oss.decoder_layer"
summary = "a place that takes any bundle: the tests export it, they never apply it"
calls_per_layer = 1
"""


def norm_candidate(name: str) -> Candidate:
    """`torch`, or a shipped solution."""
    op = bench.load_op(NORM)
    if name == "torch":
        return Candidate(op=NORM, language=Language.TORCH, source=NORM_TORCH)
    return next(candidate for info, candidate in op.solutions() if info.name == name)


def make_patch(
    folder: Path, candidate: Candidate, sweep: str, *, said: bool = True, op: Op | None = None
) -> Patch:
    """A bundle whose evidence has another figure at each point. `said`: it names its sweep."""
    op = op or bench.load_op(candidate.op)
    [chosen] = [each for each in op.contract.sweeps if each.name == sweep]
    timings = tuple(
        Timing(
            axes=point.axes,
            candidate_us=2.0 + index,
            baseline_us=5.0 + index,
            speedup=2.25 + index / 8,
            speedup_low=2.0,
            speedup_high=4.0,
            pairs=4,
            calls=8,
        )
        for index, point in enumerate(chosen.points())
    )
    evaluation = Evaluation(
        op=op.name,
        language=candidate.language,
        digest=candidate.digest,
        outcome=Outcome.CORRECT,
        baseline="eager",
        sweep=sweep if said else None,
        timings=timings,
        geomean_speedup=2.5,
    )
    return Patch.create(folder, op, candidate, evaluation, engine="transformers", made_by="test")


def softmax_library(folder: Path) -> Path:
    """A library with the corpus op softmax_lse, which only writes, and a patch point for it."""
    shutil.copytree(Path(__file__).parents[1] / "corpus/ops/softmax_lse", folder / "softmax_lse")
    with (folder / "softmax_lse/op.toml").open("a", encoding="utf-8") as file:
        file.write(POINT)
    return folder


def softmax_candidate(op: Op) -> Candidate:
    [(_, candidate)] = list(op.solutions())
    return candidate


def norm_inputs(tokens: int, hidden: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(tokens)
    return (
        torch.randn(tokens, hidden, generator=draw),
        torch.randn(tokens, hidden, generator=draw),
        torch.rand(hidden, generator=draw),
    )


def norm_expected(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> dict[str, torch.Tensor]:
    reference = bench.load_op(NORM).reference
    found = reference(input=input, residual=residual, weight=weight, epsilon=epsilon)
    return {name: value.float() for name, value in found.items()}
