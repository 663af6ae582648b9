"""The patch points of vLLM 0.25.1 by name; importing them does not import vLLM."""

from __future__ import annotations

import json

from patcher.bench import VerificationError
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.roles.add_norm import AddRmsNorm
from patcher.integrate.vllm.roles.experts import Down, GateUp
from patcher.integrate.vllm.roles.experts_sum import Reduce
from patcher.integrate.vllm.roles.experts_to_norm import ExpertsToNorm
from patcher.integrate.vllm.roles.linear import Linear
from patcher.integrate.vllm.roles.rope_kv import RopeKvUpdate
from patcher.integrate.vllm.roles.router import Routing

POINTS: dict[str, type[VllmPoint]] = {
    point.name: point
    for point in (AddRmsNorm, RopeKvUpdate, Routing, Reduce, GateUp, Down, Linear, ExpertsToNorm)
}


def main() -> None:
    """`python -m patcher.integrate.vllm.points`: write digests of the installed, reviewed vLLM."""
    names = sorted({name for point in POINTS.values() for name in point.parts})
    if gone := [name for name in names if not sources.text(name)]:
        raise VerificationError(f"this vLLM has no {', '.join(gone)}", "adapt the patch points")
    digests = {name: sources.short(name) for name in names}
    sources.DIGESTS.write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
