"""Where an op can be put in a model, asked of the patch points before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from patcher.bench import MissingError, Op, PatchPointSpec, VerificationError


@dataclass(frozen=True)
class OpPlaces:
    """The patch points of an op, asked about one model."""

    points: tuple[PatchPointSpec, ...]
    """Those that take layers of the model, or that cannot tell here."""
    refusals: tuple[str, ...]
    """Why the others take none, a clause each; empty if the op has no others."""


def places_of(op: Op, engine: str | None, config: Callable[[str], Mapping[str, Any]]) -> OpPlaces:
    """Ask the patch points of an op about a model.

    A point can tell by its class method `of_model`; see `VllmPoint` and `GptOssPoint`.

    Args:
        op: the op.
        engine: the engine that runs the model; None: any.
        config: returns the config.json of the model for an engine; called if a point is asked.

    Raises:
        UsageError: see `find_point`.
    """
    from patcher.integrate.points import all_specs, find_point

    points: list[PatchPointSpec] = []
    refusals: list[str] = []
    for spec in all_specs(op):
        if engine not in (None, spec.engine):
            continue
        try:
            says = getattr(find_point(spec.engine, spec.point), "of_model", None)
            if says is not None:
                says(config(spec.engine))
        except MissingError:
            points.append(spec)  # another machine, with the engine, may run the model
        except VerificationError as error:
            refusals.append(error.message)
        else:
            points.append(spec)
    return OpPlaces(tuple(points), tuple(dict.fromkeys(refusals)))
