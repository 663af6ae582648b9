"""How often a model's two best tokens nearly tie: `python -m patcher.bench.lab.near_ties OUT.json
FOLDER [--dtype bfloat16]`, with weights and a tokenizer in the folder.

The quality check of stock transformers against itself says at how many positions the two largest
logits are within what it allows a changed pick. Real weights and random ones of the same
configuration decode greedily after the same prompts: the text of the cloze items, and random
tokens. OUT.json has a row for each, with the gap's percentiles.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from patcher.bench import Workload
from patcher.bench.ab import cloze
from patcher.bench.ab.logits import served_logits
from patcher.bench.ab.quality import compare_logits, lead
from patcher.bench.engines import Engine, open_engine

PERCENTILES = (1, 5, 10, 25, 50, 75)
WEIGHTS: Sequence[Literal["local", "random"]] = ("local", "random")


@dataclasses.dataclass(frozen=True)
class NearTies:
    """One run; see `patcher.bench.ab.records.Quality` for the fields that it has, too."""

    model: str
    weights: str
    dtype: str
    prompts: str
    reference: str
    positions: int
    near_ties: int
    near_tie_pct: float
    flip_allowance: float
    """Median over positions of twice the largest error of a gap between the best token and one of
    the next ten, and that of the patch, which is none here."""
    within_max_error: int
    """Positions whose gap is within 4 times the largest error of any logit instead."""
    within_rmse: int
    """Positions whose gap is within 4 times the root mean square error instead."""
    baseline_rmse: float
    baseline_max_error: float
    baseline_mean_kl: float
    baseline_reference_agreement_pct: float
    widest_change: float | None
    """Largest gap where the reference picks another token; None: it picks none."""
    gap_percentiles: dict[str, float]
    """Of the largest logit's lead over the next."""


def near_ties(engine: Engine, prompts: torch.Tensor, said: str, steps: int) -> NearTies:
    """Near ties of an engine after these prompts [batch, input_len]."""
    picked = engine.generate(prompts, steps).tokens
    tokens = torch.cat([prompts, picked], dim=1)
    first, again = (served_logits(engine, prompts, picked).flatten(0, 1) for _ in range(2))
    wide, how = engine.reference_logits(tokens, picked.shape[1] + 1)
    reference = wide[:, :-1].flatten(0, 1)
    found = compare_logits(first, again, first, reference, how)
    assert found.near_ties is not None
    leads = lead(first).double()
    changed = leads[first.argmax(-1) != reference.argmax(-1)].tolist()
    return NearTies(
        model=Path(engine.workload.model).name,
        weights="real" if engine.workload.weights == "local" else "random",
        dtype=engine.workload.dtype,
        prompts=said,
        reference=found.reference,
        positions=found.positions,
        near_ties=found.near_ties,
        near_tie_pct=100 * found.near_ties / found.positions,
        flip_allowance=found.flip_allowance,
        within_max_error=int((leads <= 4 * found.baseline_max_error).sum()),
        widest_change=max(changed, default=None),
        within_rmse=int((leads <= 4 * found.baseline_rmse).sum()),
        baseline_rmse=found.baseline_rmse,
        baseline_max_error=found.baseline_max_error,
        baseline_mean_kl=found.baseline_mean_kl,
        baseline_reference_agreement_pct=found.baseline_reference_agreement_pct,
        gap_percentiles={f"p{each}": float(leads.quantile(each / 100)) for each in PERCENTILES},
    )


def main() -> None:
    """Write OUT.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--text-only", action="store_true", help="no random tokens as prompts")
    asked = parser.parse_args()
    rows = []
    for weights in WEIGHTS:
        workload = Workload(
            model=asked.folder,
            device="cpu",
            dtype=asked.dtype,
            batch=asked.batch,
            input_len=asked.input_len,
            output_len=asked.steps,
            weights=weights,
            threads=asked.threads,
        )
        engine = open_engine(workload)
        text = cloze.text_prompts(workload, cloze.tokenizer_of(workload), 1)
        kinds = {"text": text, "random tokens": engine.prompts(1)}
        for said, prompts in list(kinds.items())[: 1 if asked.text_only else 2]:
            rows.append(dataclasses.asdict(near_ties(engine, prompts, said, asked.steps)))
            print(json.dumps(rows[-1]), flush=True)
        engine.close()
    asked.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
