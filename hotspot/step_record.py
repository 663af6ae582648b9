"""The records of a step's ledger against the floor of its model."""

from __future__ import annotations

from typing import Literal

from patcher.bench import SCHEMA_VERSION, Record

GapStatus = Literal["closed", "infeasible", "untried", "unexplained"]
"""`closed`: near the floor, or a kernel of the library is there or ships for it. `infeasible`:
there is no source to change. `untried`: nothing of the library covers it. `unexplained`: nothing is
known of it."""
Answer = Literal["yes", "no", "untried", "unknown"]
LEAST_PCT = 0.5
"""Kernels of at least this share of the step are answered one by one."""


class KernelAnswer(Record):
    """Whether a kernel of a step could be faster, and whether it could be part of another one."""

    name: str
    roles: tuple[str, ...]
    """Titles of the roles that it has in a step."""
    share_pct: float
    """Percentage of the step."""
    step_ns: float
    """Time in a step."""
    launches: float
    """Launches in a step."""
    faster: Answer
    faster_reason: str
    fusible: Answer
    fusible_reason: str
    neighbours: tuple[str, ...] = ()
    """The kernels that it could be one with: those of its chain, or those beside it."""
    in_chain: bool = False
    """Whether they and it are a chain."""


class LedgerRole(Record):
    """One role of a step: what it has to move, what it takes, and what is known of the gap."""

    role: str
    """Its name in `roles.toml`; `idle` and `copies` for time without kernels."""
    title: str
    """The name that people read."""
    weight_bytes: float = 0.0
    """Weights that a step reads: of experts, of those that are expected to be chosen."""
    kv_bytes: float = 0.0
    """KV cache that a step reads or writes."""
    activation_bytes: float = 0.0
    """What its parts take in and give out. The floor has none of it: one kernel for the whole step
    would keep it on the chip."""
    floor_ns: float | None = None
    """Least time for weights, KV cache and arithmetic; None if the GPU is not known."""
    measured_ns: float
    """Time of its kernels in a step."""
    launches: float = 0.0
    """Launches in a step."""
    status: GapStatus
    """What is known of the gap."""
    reason: str
    """Why, in one sentence."""

    @property
    def bytes(self) -> float:
        """What the floor counts."""
        return self.weight_bytes + self.kv_bytes

    @property
    def gap_ns(self) -> float | None:
        """Time beyond the floor; negative where it reads less than is counted."""
        return None if self.floor_ns is None else self.measured_ns - self.floor_ns

    @property
    def sol_pct(self) -> float | None:
        """The floor as a percentage of the time: how near it is to the speed of light."""
        if not self.floor_ns or not self.measured_ns:
            return None
        return 100 * self.floor_ns / self.measured_ns


class StepLedger(Record):
    """One decode step of a profile against the floor of its model on its GPU."""

    schema_version: int = SCHEMA_VERSION
    gpu: str | None
    """The GPU's name; None if nothing says it."""
    batch: int
    """Sequences in the step."""
    context: int
    """Tokens of a sequence that attention reads."""
    weight_format: str
    """Of the weights, in words."""
    distinct_experts: float | None
    """Experts of a layer that a step is expected to read, if routing is even."""
    experts: int
    """Experts of a layer; 0 for a dense model."""
    rate_bytes_per_s: float | None
    """The rate that the floor counts with."""
    rate_source: str
    """How the rate is known."""
    roles: tuple[LedgerRole, ...]
    """In the order of a layer; their times add up to `step_ns`."""
    kernels: tuple[KernelAnswer, ...]
    """Every kernel of `LEAST_PCT` of the step and more, the largest first."""
    bytes: float
    """Weights and KV cache of a step."""
    floor_ns: float | None
    """The sum over roles; None if the GPU is not known."""
    step_ns: float
    """Wall time of a step; in a summary, the time of its kernels."""
    sol_pct: float | None
    """`floor_ns` as a percentage of `step_ns`: how near the step is to the speed of light."""
    launches: float
    """Kernel launches in a step."""
    host_pct: float | None
    """Percentage of the step in which the GPU ran nothing; None in a summary."""
    notes: tuple[str, ...] = ()
    """What is not counted or not known, in sentences."""

    def sentences(self) -> list[str]:
        """The total, and what it is counted with."""
        floor = "floor unknown"
        if self.floor_ns is not None and self.sol_pct is not None:
            floor = (
                f"floor {self.floor_ns / 1e6:.2f} ms: {self.sol_pct:.1f} % of the speed of light"
            )
        idle = "" if self.host_pct is None else f", the GPU idle for {self.host_pct:.1f} % of it"
        said = [
            f"step {self.step_ns / 1e6:.2f} ms, {floor}",
            f"{self.launches:.0f} launches a step{idle}",
            f"batch {self.batch}, {self.context:,} tokens of context",
            f"weights: {self.weight_format}",
        ]
        if self.distinct_experts is not None:
            chosen = f"{self.distinct_experts:.1f} of {self.experts} experts a layer"
            said.append(f"{chosen}, if routing is even")
        if self.rate_bytes_per_s:
            rate = f"{self.bytes / 1e9:.2f} GB at {self.rate_bytes_per_s / 1e12:.3g} TB/s"
            said.append(f"{rate}, {self.rate_source}; {self.gpu}")
        return [*said, *self.notes]
