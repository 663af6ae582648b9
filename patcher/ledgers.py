"""A profile's step against the floor of its model and traffic."""

from __future__ import annotations

from patcher.bench import DType, MissingError, UsageError, Workload, presets
from patcher.bench.engines import in_process
from patcher.hotspot import Places, Profile, ProfileWarning
from patcher.places import places_in


def with_ledger(
    profile: Profile,
    model: str,
    *,
    batch: int | None = None,
    context: int | None = None,
    gpu: str | None = None,
    dtype: DType | None = None,
) -> Profile:
    """A profile that was read, with its ledger.

    Args:
        profile: of decode steps.
        model: a preset, a folder with a config.json, such a file, or a Hugging Face id.
        batch: sequences in a step; by default the preset's.
        context: tokens of a sequence that attention reads; by default the preset's prompt.
        gpu: the GPU's name, where the source does not say it.
        dtype: that the model ran in; by default as it was published.

    Raises:
        UsageError: the model or its traffic is not known, or see `step_ledger`.
        MissingError: the model's config.json is not to be had.
    """
    known = presets().get(model)
    batch = batch or (known.batch if known else None)
    context = context or (known.input_len if known else None)
    if batch is None or context is None:
        what = "--batch" if batch is None else "--input-len"
        raise UsageError(f"the bytes of a step of {model} depend on its traffic", f"give {what}")
    return _with(profile, model, batch, context, True, gpu, places_in(model), dtype)


def with_ledger_of(profile: Profile, workload: Workload) -> Profile:
    """A profile of a workload that was captured here, with its ledger. Raises as `with_ledger`."""
    # PyTorch engines have no random weights in a checkpoint's format
    quantised = not (in_process(workload.engine) and workload.weights == "random")
    context = workload.input_len
    places = places_in(workload.model, workload.engine)
    traffic = (workload.model, workload.batch, context)
    return _with(profile, *traffic, quantised, None, places, workload.dtype)


def with_ledger_if_known(profile: Profile, workload: Workload) -> Profile:
    """The same; where it cannot be made, the profile with a warning that says why."""
    try:
        return with_ledger_of(profile, workload)
    except (MissingError, UsageError) as error:
        warning = ProfileWarning(kind="no_ledger", message=f"no ledger: {error.message}")
        return profile.model_copy(update={"warnings": (*profile.warnings, warning)})


def _with(
    profile: Profile,
    model: str,
    batch: int,
    context: int,
    quantised: bool,
    gpu: str | None,
    places: Places | None,
    dtype: DType | None,
) -> Profile:
    # what counts a model's bytes needs PyTorch, and the rest numpy
    from patcher.hotspot.step_bytes import step_bytes
    from patcher.hotspot.step_ledger import step_ledger

    counted = step_bytes(model, batch, context, quantised, dtype)
    found = step_ledger(profile, counted, gpu=gpu, places=places)
    return profile.model_copy(update={"ledger": found})
