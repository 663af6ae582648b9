"""Attempts made up in a line each, for tests of what follows from them."""

from __future__ import annotations

from patcher.attempts import ReplyFailure
from patcher.attempts.history import CandidateRequest, IterationResult, RequestKind
from patcher.bench import Candidate, Check, Evaluation, Language, Outcome, Timing

OP = "fused_add_rms_norm"
SHAPES = (
    "for (int i = 0; i < n; ++i) a[i] = b[i];",
    "__shared__ float s[32]; __syncthreads(); s[0] = a; atomicAdd(out, s[1]);",
    "while (n) { float4 v = load(x); n = __shfl_xor_sync(v, n, 16); }",
    "#pragma omp parallel for\nswitch (n) { case 1: return; default: throw n; }",
    "template <int ROWS = 8> struct S { static constexpr double k = 1; }; using T = S<4>; f<T>();",
)
"""Bodies of sources that differ in structure."""


def timed(speedup: float, sol_pct: float | None = None) -> Timing:
    """One timed point; its interval is 2 % to either side."""
    return Timing(
        axes={"tokens": 8, "hidden": 256},
        candidate_us=10 / speedup,
        baseline_us=10,
        speedup=speedup,
        speedup_low=speedup * 0.98,
        speedup_high=speedup * 1.02,
        pairs=8,
        calls=100,
        sol_pct=sol_pct,
    )


def judged(said: float | Outcome, source: str = "x", sol_pct: float | None = None) -> Evaluation:
    """What a judge might say: a speedup, or how it failed."""
    candidate = Candidate(op=OP, language=Language.CPP, source=source)
    named = {"op": OP, "language": Language.CPP, "digest": candidate.digest}
    if isinstance(said, Outcome):
        check = Check(name="values", passed=False, detail="detail of the failed check")
        return Evaluation(**named, outcome=said, checks=(check,), log="a log of the failure")
    return Evaluation(
        **named,
        outcome=Outcome.CORRECT if said > 1 else Outcome.TOO_SLOW,
        baseline="eager",
        timings=(timed(said, sol_pct),),
        geomean_speedup=said,
    )


def tried(
    iteration: int,
    said: float | Outcome | None,
    kind: RequestKind = "generate",
    parents: tuple[int, ...] = (),
    *,
    round: int | None = None,
    shape: int = 0,
    island: int | None = None,
    after: int | None = None,
    sol_pct: float | None = None,
) -> IterationResult:
    """An attempt; `said` None: the reply held no source. A round of its own unless told."""
    source = SHAPES[shape]
    return IterationResult(
        iteration=iteration,
        round=iteration if round is None else round,
        ask=CandidateRequest(kind=kind, parents=parents, island=island, after=after),
        candidate=None
        if said is None
        else Candidate(op=OP, language=Language.CPP, source=f"void {OP}() {{ {source} }}"),
        evaluation=None if said is None else judged(said, sol_pct=sol_pct),
        failure=ReplyFailure(kind="no_source", detail="no code block") if said is None else None,
    )
