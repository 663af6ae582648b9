"""Rewards as data: a pure function of evaluations, and the command that pays for them."""

from __future__ import annotations

import pytest

from patcher import bench
from patcher.bench import (
    BusyError,
    Candidate,
    Check,
    Evaluation,
    Language,
    MissingError,
    Outcome,
    Timing,
    UsageError,
)
from patcher.bench.judge import JudgeSettings
from patcher.judges import reward as judged_
from patcher.judges.remote import UnreachableError
from patcher.judges.reward import judge_for_reward, reward

OP = "fused_add_rms_norm"


def evaluation(
    baseline: str, *intervals: tuple[float, float], digest: str = "a" * 64
) -> Evaluation:
    """A right candidate whose points have these (speedup, lower end)."""
    timings = tuple(
        Timing(
            axes={"tokens": n},
            candidate_us=1,
            baseline_us=speedup,
            speedup=speedup,
            speedup_low=low,
            speedup_high=2 * speedup - low,
            pairs=6,
            calls=100,
        )
        for n, (speedup, low) in enumerate(intervals, 1)
    )
    geomean = bench.geomean([timing.speedup for timing in timings])
    return Evaluation(
        op=OP,
        language="cpp",
        digest=digest,
        outcome=Outcome.CORRECT if geomean > 1 else Outcome.TOO_SLOW,
        baseline=baseline,
        timings=timings,
        geomean_speedup=geomean,
    )


def wrong(outcome: Outcome) -> Evaluation:
    check = Check(name="values", passed=False, detail="off")
    return Evaluation(op=OP, language="cpp", digest="a" * 64, outcome=outcome, checks=(check,))


FAST, SLOW = (1.2, 1.06), (1.2, 1.04)


@pytest.mark.parametrize(
    ("eager", "compiled", "value"),
    [
        ((0.5, 0.4), (0.5, 0.4), 1),
        (SLOW, SLOW, 1),
        ((9.0, 1.05), FAST, 1),
        (FAST, SLOW, 2),
        (FAST, FAST, 3),
        (SLOW, FAST, 1),
    ],
)
def test_the_lower_ends_of_the_intervals_decide(
    eager: tuple[float, float], compiled: tuple[float, float], value: int
) -> None:
    found = reward([evaluation("torch.compile", compiled), evaluation("eager", eager)])
    assert found.value == value
    assert found.speedups["eager"].geomean == pytest.approx(eager[0])
    assert found.speedups["torch.compile"].geomean_low == pytest.approx(compiled[1])
    assert found.missing == {}
    if value == 1:
        low = f"{eager[1]:.3f}x"
        assert found.why == f"right, not over 5 % faster than eager (lower end {low})"


def test_all_points_count_together() -> None:
    both = evaluation("eager", (4.0, 4.0), (0.25, 0.25))
    assert reward([both], against=["eager"]).value == 1
    assert reward([evaluation("eager", (4.0, 4.0), (0.3, 0.3))], against=["eager"]).value == 2


@pytest.mark.parametrize(
    "outcome",
    [each for each in Outcome if each not in (Outcome.CORRECT, Outcome.TOO_SLOW, Outcome.COMPILED)],
)
def test_wrong_once_is_wrong(outcome: Outcome) -> None:
    found = reward([evaluation("eager", FAST), wrong(outcome)])
    assert (found.value, found.speedups) == (-1, {})
    assert "values" in found.why


def test_what_was_not_judged_or_does_not_run_is_said_and_not_won() -> None:
    found = reward([evaluation("eager", FAST)])
    assert (found.value, found.missing) == (2, {"torch.compile": "not judged"})
    assert "not than torch.compile (not judged)" in found.why
    found = reward([evaluation("torch.compile", FAST)], {"eager": "no such baseline"})
    assert (found.value, found.missing) == (1, {"eager": "no such baseline"})
    assert reward([evaluation("flashinfer", FAST)], against=()).value == 1


def test_a_reward_is_of_one_candidate() -> None:
    compiled = Evaluation(op=OP, language="hip", digest="a" * 64, outcome=Outcome.COMPILED)
    with pytest.raises(ValueError, match="neither right nor wrong"):
        reward([compiled])
    with pytest.raises(ValueError, match="one candidate"):
        reward([])
    with pytest.raises(ValueError, match="one candidate"):
        reward([evaluation("eager", FAST), evaluation("torch.compile", FAST, digest="b" * 64)])
    with pytest.raises(ValueError, match="two evaluations"):
        reward([evaluation("eager", FAST), evaluation("eager", FAST)])


def test_a_wrong_candidate_is_judged_once_and_a_right_one_against_each() -> None:
    bad = Candidate(op=OP, language=Language.CPP, source="int other;")
    found = judge_for_reward("local", bad, JudgeSettings(threads=1), "t", lambda *_: None)
    assert list(found.evaluations) == ["eager"]
    assert found.reward.value == -1
    good = next(c for info, c in bench.load_op(OP).solutions() if info.name == "cpu_simd")
    settings = JudgeSettings(threads=1, pairs=3, calls=50, lives_s=0.1, points=1)
    found = judge_for_reward("local", good, settings, "t", lambda *_: None, against=["eager"])
    assert found.evaluations["eager"].baseline == "eager"
    assert found.reward.value in (1, 2)
    assert found.reward.speedups["eager"].geomean == found.evaluations["eager"].geomean_speedup


def test_a_baseline_that_does_not_run_here_takes_its_level_away_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The judge is scripted: torch.compile runs on every machine that tests."""

    absent: Exception = MissingError("no compiler")

    class Scripted:
        def __init__(self, baseline: str | None) -> None:
            self.baseline = baseline

        def __enter__(self) -> Scripted:
            return self

        def __exit__(self, *exc: object) -> None:
            return None

        def evaluate(self, candidates: list[Candidate]) -> list[Evaluation]:
            if self.baseline == "torch.compile":
                raise absent
            return [evaluation("eager", FAST, digest=candidates[0].digest)]

    monkeypatch.setattr(judged_, "open_judges", lambda _w, s, *_, **_k: Scripted(s.baseline))
    candidate = Candidate(op=OP, language=Language.CPP, source="x")
    found = judge_for_reward("local", candidate, JudgeSettings(), "t", lambda *_: None)
    assert (found.reward.value, found.reward.missing) == (2, {"torch.compile": "no compiler"})
    # a machine that is busy now says nothing of what the candidate is worth
    absent = BusyError("this machine is too busy")
    with pytest.raises(BusyError):
        judge_for_reward("local", candidate, JudgeSettings(), "t", lambda *_: None)
    down = Candidate(op="moe_matmul_down", language=Language.CPP, source="x")
    with pytest.raises(UsageError, match=r"has no baseline of torch\.compile"):
        judge_for_reward(
            "local", down, JudgeSettings(), "t", lambda *_: None, against=["torch.compile"]
        )


def test_a_judge_elsewhere_says_what_the_local_one_says(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str | None, Evaluation | Exception] = {}
    asked: list[str | None] = []

    class Elsewhere:
        def __init__(self, *_: object) -> None:
            """No place."""

        def __enter__(self) -> Elsewhere:
            return self

        def __exit__(self, *exc: object) -> None:
            return None

        def submit(self, _: Candidate, settings: JudgeSettings) -> str | None:
            asked.append(settings.baseline)
            return settings.baseline

        def gather(self, jobs: list[str | None]) -> list[Evaluation]:
            found = [answers[job] for job in jobs]
            for each in found:
                if isinstance(each, Exception):
                    raise each
            return [each for each in found if isinstance(each, Evaluation)]

    monkeypatch.setattr(judged_, "remote_judge", lambda _: (Elsewhere, ""))
    candidate = Candidate(op=OP, language=Language.CPP, source="x")

    def rewarded() -> tuple[int, dict[str, str], list[str]]:
        found = judge_for_reward("there", candidate, JudgeSettings(), "t", lambda *_: None)
        return found.reward.value, found.reward.missing, list(found.evaluations)

    answers["eager"] = evaluation("eager", FAST, digest=candidate.digest)
    answers["torch.compile"] = MissingError("no compiler")
    assert rewarded() == (2, {"torch.compile": "no compiler"}, ["eager"])
    assert asked[:2] == ["eager", "torch.compile"], "both are handed over before one is waited for"
    answers["torch.compile"] = UnreachableError("the cluster has ended")
    with pytest.raises(UnreachableError):
        rewarded()
    wrong = evaluation("eager", FAST, digest=candidate.digest)
    answers["eager"] = wrong.model_copy(update={"outcome": Outcome.MISMATCH})
    assert rewarded()[0] == -1, "a wrong one is wrong, whatever its other judgement meets"
