"""Where an op can be put in a model, asked of the patch points before anything is loaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from patcher.bench import MissingError, Op, PatcherError, PatchPointSpec, VerificationError
from patcher.integrate.layers import StepCalls
from patcher.integrate.points import POINTS, all_specs, entries_of, find_point, present_name

if TYPE_CHECKING:
    from patcher.integrate.guards import CallGuards


@dataclass(frozen=True)
class OpPlaces:
    """The patch points of an op, asked about one model."""

    points: tuple[PatchPointSpec, ...]
    """Those that take layers of the model, or that cannot tell here."""
    refusals: tuple[str, ...]
    """Why the others take none, a clause each; empty if the op has no others."""


_READERS = {
    "transformers": "patcher.integrate.transformers.places",
    "vllm": "patcher.integrate.vllm.places",
}
"""By engine, the module whose `of_model` tells of the points in its `LAYERS`, and imports neither
the engine nor torch. A point of another package has a class method of that name."""


def of_model(engine: str, point: str, config: Callable[[], Mapping[str, Any]]) -> str | None:
    """The layers that a patch point has in a model.

    Args:
        engine: the engine's name.
        point: the point's name, present or former.
        config: reads the model's config.json, if the point asks for it.

    Returns:
        A sentence; None for a point that looks for its layers in a built model.

    Raises:
        VerificationError: the model has none; the message says why.
        UsageError, MissingError: see `find_point`; or the engine is not installed.
    """
    name = present_name(engine, point)
    if (known := _ours(engine, name, "of_model")) is not None:
        return str(known(config))
    if engine not in _READERS and POINTS.ours(engine) and not entries_of(engine):
        return None  # of ours, these alone can tell; the others are not imported to be asked
    says = getattr(find_point(engine, name), "of_model", None)
    if says is None:
        return None
    read = config()
    try:
        return str(says(read))
    except PatcherError:
        raise
    except Exception as error:  # whatever the code of others raises
        raise MissingError(
            f"of_model of the patch point {name} in {engine} raises {type(error).__name__}: "
            f"{error}",
            "repair or uninstall the package that brings it",
        ) from error


def calls_in_step(
    engine: str, point: str, config: Mapping[str, Any], guards: CallGuards | None = None
) -> StepCalls | None:
    """How often a step of decode comes by a patch point that has layers in a model; None where
    that is known of a built model alone.

    Args:
        engine: the engine's name.
        point: the point's name, present or former.
        config: the model's config.json.
        guards: those of a patch; in transformers they are asked about each layer's sizes.

    Raises:
        UsageError: the engine cannot build the model.
    """
    counted = _ours(engine, present_name(engine, point), "calls_in_step")
    found: StepCalls | None = None if counted is None else counted(config, guards)
    return found


def _ours(engine: str, name: str, function: str) -> Callable[..., Any] | None:
    """A function of our reader of an engine's models, for a point; None: it does not tell."""
    if engine not in _READERS:
        return None
    reader = importlib.import_module(_READERS[engine])
    if name not in reader.LAYERS or not hasattr(reader, function):
        return None
    return partial(getattr(reader, function), name)


def places_of(op: Op, engine: str | None, config: Callable[[str], Mapping[str, Any]]) -> OpPlaces:
    """Ask the patch points of an op about a model.

    Args:
        op: the op.
        engine: the engine that runs the model; None: any.
        config: returns the config.json of the model for an engine; called if a point is asked.

    Raises:
        UsageError: see `find_point`.
    """
    points: list[PatchPointSpec] = []
    refusals: list[str] = []
    for spec in all_specs(op):
        if engine not in (None, spec.engine):
            continue
        try:
            of_model(spec.engine, spec.point, partial(config, spec.engine))
        except MissingError:
            # another machine, with the engine, may run the model
            if engine is not None and (refusal := _stated(spec, config)):
                refusals.append(refusal)
            else:
                points.append(spec)
        except VerificationError as error:
            refusals.append(error.message)
        else:
            points.append(spec)
    return OpPlaces(tuple(points), tuple(dict.fromkeys(refusals)))


def _stated(spec: PatchPointSpec, config: Callable[[str], Mapping[str, Any]]) -> str | None:
    """Why a config.json alone says that a model has no layers of a point; None if it does not."""
    must_fit = _ours(spec.engine, present_name(spec.engine, spec.point), "must_fit")
    if must_fit is None:
        return None
    try:
        must_fit(config(spec.engine))
    except VerificationError as error:
        return str(error.message)
    return None
