"""Which sizes a kernel is judged at for a model: its own, not those that the contract names."""

from __future__ import annotations

from patcher.bench import SIZED, Op, UsageError, Workload, dtypes_in
from patcher.bench.engines.architecture import known_sizes
from patcher.places import places_in


def served_sweep(op: Op, device: str, asked: str | None, workload: Workload | None) -> str | None:
    """The name of the sweep to time a kernel on, with the sizes and the dtype of the served model.

    Args:
        op: the op.
        device: `cpu` or `cuda`, where kernels are judged.
        asked: the sweep that the user named, if any. One with sizes of its own stays as it is.
        workload: the served model; None: there is none.

    Returns:
        The name; None for the device's default sweep as it is in the contract.

    Raises:
        UsageError: there is no such sweep, or the op's kernels are not for such sizes.
        MissingError: the model's config.json is not on this machine.
    """
    sweep = op.sweep(device, asked)
    if workload is None or SIZED in sweep.name:
        return asked
    first = next(iter(op.contract.dtypes))
    if asked is None:
        fitting = [one for one in op.contract.sweeps if one.device == device]
        sweep = next((one for one in fitting if one.dtypes[first] == workload.dtype), sweep)
    sizes = known_sizes(workload.model)
    axes = sizes.axes(sweep.fixed)
    same = sweep.sized(axes, {}) == sweep  # what it sweeps was chosen for such a model, too
    values = sizes.readers if sweep.axis == "outer" and not same else ()
    found = sweep.sized(axes, dtypes_in(workload.dtype, sweep, op.contract), values)
    if found.name == op.sweep(device, asked).name:
        return asked
    return op.sweep(device, found.name).name


def place_of(op: Op, device: str, asked: str | None, workload: Workload) -> str:
    """Where an op goes in for a served model and what it is judged at, in words.

    Args:
        op, device, asked, workload: see `served_sweep`.

    Raises:
        UsageError: no patch point of the engine takes this model; or see `served_sweep`.
        MissingError: see `served_sweep`.
    """
    places = places_in(workload.model, workload.engine)
    points, refusal = places(op) if places is not None else ((), "its config.json is not known")
    if not points:
        raise UsageError(
            f"{op.name} cannot be put in {workload.model} on {workload.engine}: {refusal}",
            f"`patcher profile {workload.model}` says which ops can",
        )
    sweep = op.sweep(device, served_sweep(op, device, asked, workload))
    values = ", ".join(f"{value:,}" for value in sweep.values)
    sizes = [f"{sweep.axis} {values}", *(f"{axis} {size:,}" for axis, size in sweep.fixed.items())]
    kinds = ", ".join(dict.fromkeys(sweep.dtypes.values()))
    return f"{op.name} goes in at {', '.join(points)}; judged at {'; '.join(sizes)}; {kinds}"
