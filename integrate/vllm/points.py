"""The patch points of vLLM 0.25.1 by name; what is imported here imports no vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from integrate.vllm.moe import Reduce, Routing
from integrate.vllm.norm import AddRmsNorm
from integrate.vllm.rope import RopeKvUpdate

if TYPE_CHECKING:
    from integrate.points import PatchPoint

POINTS: dict[str, type[PatchPoint]] = {
    point.name: point for point in (AddRmsNorm, RopeKvUpdate, Routing, Reduce)
}
