"""The patch points of vLLM 0.25.1 by name; what is imported here imports no vLLM."""

from __future__ import annotations

from integrate.vllm.matmul import Down, GateUp
from integrate.vllm.moe import Reduce, Routing
from integrate.vllm.norm import AddRmsNorm
from integrate.vllm.rope import RopeKvUpdate

POINTS: dict[str, type[AddRmsNorm | RopeKvUpdate | Routing | Reduce | GateUp | Down]] = {
    point.name: point for point in (AddRmsNorm, RopeKvUpdate, Routing, Reduce, GateUp, Down)
}
