"""A run's verdicts come from one kind of device: speedups of another are not comparable."""

from __future__ import annotations

from bench import Evaluation, VerificationError
from patcher.runs.run import Run


def hold(run: Run, evaluation: Evaluation) -> Evaluation:
    """The evaluation, held against the run's first that ran on a device.

    Raises:
        VerificationError: it ran on another GPU or processor, or under another driver.
    """
    now = _device(evaluation)
    for name in run.state.results if now else ():
        if name.endswith("/evaluate") and (before := _device(run.load(name, Evaluation))):
            if before != now:
                raise VerificationError(
                    f"run {run.id} was judged on {before}, and this candidate on {now}",
                    "serve all jobs of a run on one kind of machine: remove the other one's "
                    "folders from results/ and serve them again",
                )
            break
    return evaluation


def _device(evaluation: Evaluation) -> str | None:
    found = evaluation.environment
    if found is None:
        return None
    return f"{found.device}, driver {found.driver}" if found.driver else found.device
