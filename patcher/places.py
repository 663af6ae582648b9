"""Where the ops of the library can be put in one model: what a profile may claim, and a run try."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from patcher.bench import MissingError, UsageError, Workload, load_ops, presets
from patcher.bench.engines import in_process
from patcher.bench.engines.architecture import full_config
from patcher.hotspot import Places
from patcher.integrate import Patch, of_model, places_of


def places_in(model: str, engine: str | None = None) -> Places | None:
    """What to ask of an op in a profile of the model; None where its config.json is not known.

    Args:
        model: as a person named it; in a profile that is read from a file, any name.
        engine: the engine that runs it; None: any. Where one is named, the model is known.

    Raises:
        UsageError, MissingError: the engine is known, and the model is not.
    """
    if engine is None and model not in presets() and not Path(model).exists():
        return None
    config = config_of(model)

    @cache
    def asked(name: str) -> tuple[tuple[str, ...], str]:
        found = places_of(load_ops()[name], engine, config)
        points = tuple(f"{spec.engine}: {spec.point}" for spec in found.points)
        if points:
            return points, ""
        none = f"it has no patch point in {engine or 'any engine'}"
        return (), "; ".join(found.refusals) or none

    return lambda op: asked(op.name)


def require_some_place(workload: Workload) -> None:
    """Refuse a model that no op of the library can be put in, on its engine.

    Raises:
        UsageError: the message says why.
    """
    config = config_of(workload.model)
    refusals: Counter[str] = Counter()
    for op in load_ops().values():
        found = places_of(op, workload.engine, config)
        if found.points:
            return
        refusals.update(found.refusals)
    why = f": {refusals.most_common(1)[0][0]}" if refusals else ""
    raise UsageError(
        f"no op of the library can be put in {workload.model} on {workload.engine}{why}",
        "`patcher profile` says what its step is made of; docs/extending.md, how to add a patch "
        "point",
    )


def require_layers(workload: Workload, patches: Iterable[Patch]) -> None:
    """Refuse a patch that has no layers in the workload's model, before the model is loaded.

    Raises:
        VerificationError: there is one; the message says why.
        UsageError: as `full_config`.
    """
    config = config_of(workload.model)
    for patch in patches:
        target = patch.manifest.target
        with suppress(MissingError):  # what loads the model tells of it
            of_model(target.engine, target.point, partial(config, target.engine))


def config_of(model: str) -> Callable[[str], Mapping[str, Any]]:
    """The config.json of a model for an engine, read once."""

    @cache
    def config(engine: str) -> Mapping[str, Any]:
        known = presets().get(model)
        if known is not None and in_process(engine):
            # only engines with models of their own need the class, which takes a second to look up
            return {"model_type": known.architecture, **known.config, **known.published}
        return full_config(model)

    return config
