"""Which sizes a kernel is judged at for a model: its own, not those that the contract names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from patcher.bench import (
    SIZED,
    Op,
    Sweep,
    UsageError,
    Workload,
    dtypes_in,
)
from patcher.bench.engines.architecture import known_sizes
from patcher.bench.engines.kv_cache import cached_attention, decode_cache, table_width
from patcher.bench.engines.served_axes import ServedAxes, served_axes
from patcher.bench.engines.served_model import longest
from patcher.bench.judge.planning import require_fits
from patcher.places import places_in


@dataclass(frozen=True)
class ServedPlace:
    """Where an op goes in for a served model, and what its kernels are judged at."""

    sweep: str | None
    """See `served_sweep`."""
    said: str
    """Both, in words."""


def served_sweep(op: Op, device: str, asked: str | None, workload: Workload | None) -> str | None:
    """The name of the sweep to time a kernel on, with the sizes and the dtype of the served model.

    An op over a paged KV cache is timed at the length that requests have in the middle of the
    output, for the workload's batch, too.

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
    default = op.sweep(device, asked)
    if workload is None or SIZED in default.name:
        return asked
    sweep, first = default, next(iter(op.contract.dtypes))
    if asked is None:
        fitting = [one for one in op.contract.sweeps if one.device == device]
        sweep = next((one for one in fitting if one.dtypes[first] == workload.dtype), sweep)
    sizes = known_sizes(workload.model)
    axes = sizes.axes(sweep.fixed)
    kinds = dtypes_in(workload.dtype, sweep, op.contract)
    if (cache := served_axes(op.name)) is not None:
        found = _over_a_cache(op, sweep, cache, axes, kinds, workload)
    else:
        same = sweep.sized(axes, {}) == sweep  # what it sweeps was chosen for such a model, too
        values = sizes.readers if sweep.axis == "outer" and not same else ()
        found = sweep.sized(axes, kinds, values)
    if found.name == default.name:
        return asked
    return op.sweep(device, found.name).name


def _over_a_cache(
    op: Op,
    sweep: Sweep,
    names: ServedAxes,
    axes: Mapping[str, int],
    dtypes: Mapping[str, str],
    workload: Workload,
) -> Sweep:
    """The sweep with a cache that has pages for each request of its own. Batches above the served
    one are left out where they are more than the judge can send."""
    attention = cached_attention(workload.model)
    cache = decode_cache(workload, sweep.fixed[names.block_size])
    stated = {axis: getattr(attention, field) for axis, field in names.model.items()}
    sized = {**axes, **{axis: size for axis, size in stated.items() if size is not None}}

    def at(batches: Sequence[int]) -> Sweep:
        own = {names.pages: cache.pages, names.blocks: cache.pages * batches[-1]}
        return sweep.sized({**sized, **own}, dtypes, batches)

    batches = sorted({*sweep.values, workload.batch})
    while batches[-1] > workload.batch and not _fits(op, at(batches)):
        batches.pop()
    return at(batches)


def _fits(op: Op, sweep: Sweep) -> bool:
    """Whether the judge can send each point's tensors; of a GPU's memory nothing is asked here."""
    try:
        require_fits(op, sweep, "cpu")
    except UsageError:
        return False
    return True


def place_of(op: Op, device: str, asked: str | None, workload: Workload) -> ServedPlace:
    """Where an op goes in for a served model and what it is judged at.

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
    name = served_sweep(op, device, asked, workload)
    sweep = op.sweep(device, name)
    values = ", ".join(f"{value:,}" for value in sweep.values)
    sizes = [f"{sweep.axis} {values}", *(f"{axis} {size:,}" for axis, size in sweep.fixed.items())]
    kinds = ", ".join(dict.fromkeys(sweep.dtypes.values()))
    said = f"{op.name} goes in at {', '.join(points)}; judged at {'; '.join(sizes)}; {kinds}"
    return ServedPlace(name, said + _cache_said(op, sweep, workload))


def _cache_said(op: Op, sweep: Sweep, workload: Workload) -> str:
    """Beside what an op over a paged cache is judged at, what is served."""
    names = served_axes(op.name)
    if names is None:
        return ""
    block = sweep.fixed[names.block_size]
    said = f"; served requests have {decode_cache(workload, block).span}"
    room = table_width(workload.engine, longest(workload, ()), block)
    return said if room is None else f"{said} of a table with room for at least {room:,}"
