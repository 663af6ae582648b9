"""A run's verdicts come from one kind of device: speedups of another are not comparable."""

from __future__ import annotations

from patcher.bench import Environment, Evaluation, VerificationError
from patcher.runs.run import Run


def require_same_device(run: Run, evaluation: Evaluation) -> Evaluation:
    """The evaluation, held against the run's first that ran on a device.

    Raises:
        VerificationError: it ran on another GPU or processor, under another driver, or beside other
            packages: where an engine is missing, its kernels are no baselines, and a candidate
            would look better than one that stood against them.
    """
    now = evaluation.environment
    if now is None:
        return evaluation
    for name in run.state.results:
        if name.endswith("/evaluate") and (before := run.load(name, Evaluation).environment):
            if _device(before) != _device(now):
                raise VerificationError(
                    f"run {run.id} was judged on {_device(before)}, and this candidate on "
                    f"{_device(now)}",
                    "serve all jobs of a run on one kind of machine: remove the other one's "
                    f"folders from results/ and serve them again; or {_anew(run)}",
                )
            _refuse_other_packages(run, before, now)
            break
    return evaluation


def _refuse_other_packages(run: Run, before: Environment, now: Environment) -> None:
    changed = [
        f"{name} {now.packages.get(name, 'none')}, not {before.packages.get(name, 'none')}"
        for name in sorted({*before.packages, *now.packages})
        if before.packages.get(name) != now.packages.get(name)
    ]
    if changed:
        raise VerificationError(
            f"run {run.id}: a candidate was judged beside {', '.join(changed)}",
            "serve all jobs of a run beside the same packages: they decide what the baselines are; "
            f"remove its folder from results/ and serve it again; or {_anew(run)}",
        )


def _anew(run: Run) -> str:
    return f"have all of it judged on the new one: patcher resume {run.id} --machine-changed"


def _device(found: Environment) -> str:
    return f"{found.device}, driver {found.driver}" if found.driver else found.device
