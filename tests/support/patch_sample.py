"""What the tests of patches share: a candidate, its evaluation, a kernel, a small workload."""

from __future__ import annotations

from pathlib import Path

import torch

from patcher import bench
from patcher.bench import Candidate, Evaluation, Language, Outcome, Timing, Workload
from patcher.integrate import Patch
from patcher.integrate.guards import AxisBounds, CallGuards, TensorGuard

OP = bench.load_op("fused_add_rms_norm")
SOURCE = "// fused_add_rms_norm\n"
CANDIDATE = Candidate(op=OP.name, language=Language.CPP, source=SOURCE)
LAYERS = bench.preset("gpt-oss-tiny").layers
TINY = Workload(
    model="gpt-oss-tiny",
    device="cpu",
    dtype="float32",
    batch=2,
    input_len=8,
    output_len=4,
    threads=1,
)


def evaluation(candidate: Candidate = CANDIDATE, outcome: Outcome = Outcome.CORRECT) -> Evaluation:
    timing = Timing(
        axes={"tokens": 1},
        candidate_us=1,
        baseline_us=2,
        speedup=2,
        speedup_low=1.9,
        speedup_high=2.1,
        pairs=4,
        calls=8,
    )
    right = outcome is Outcome.CORRECT
    return Evaluation(
        op=OP.name,
        language="cpp",
        digest=candidate.digest,
        outcome=outcome,
        timings=(timing,) if right else (),
        geomean_speedup=2.0 if right else None,
    )


def kernel(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> None:
    """The op in plain PyTorch, in place: what a built kernel does."""
    residual.add_(input)
    wide = residual.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    input.copy_(weight * (wide * scale))


def add_norm_guards(axes: dict[str, AxisBounds] | None = None) -> CallGuards:
    """Of the op, for float32 on the CPU."""
    rows, weight = ("tokens", "hidden"), ("hidden",)
    return CallGuards(
        device="cpu",
        tensors=(
            TensorGuard("input", rows, "T", mutated=True),
            TensorGuard("residual", rows, "T", mutated=True),
            TensorGuard("weight", weight, "W", mutated=False),
        ),
        scalars=(("epsilon", float),),
        dtypes=({"T": torch.float32, "W": torch.float32},),
        axes=axes or {},
    )


def make_patch(folder: Path) -> Patch:
    return Patch.create(folder, OP, CANDIDATE, evaluation(), engine="transformers", made_by="test")


def state(model: torch.nn.Module) -> list[dict[str, int]]:
    """The class and every attribute of every module instance, and which object it is."""
    return [
        {name: id(v) for name, v in module.__dict__.items()} | {"__class__": id(type(module))}
        for module in model.modules()
    ]
