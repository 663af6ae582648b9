"""Options of a command as dataclasses: one parameter a group, one panel of help a group."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, get_args, get_type_hints

KEYWORD = inspect.Parameter.KEYWORD_ONLY
ANNOTATED: Any = Annotated
"""As a value: what it is of is known only here."""


@dataclass(frozen=True)
class OptionGroup:
    """A dataclass whose fields are options: each has a default, and is annotated as typer wants."""

    PANEL: ClassVar[str]
    """Title of its panel in the help."""


def grouped(function: Callable[..., int]) -> Callable[..., int]:
    """A command for typer of a function that takes some of its options as `OptionGroup`s."""
    signature = inspect.signature(function, eval_str=True)
    groups: dict[str, type[OptionGroup]] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if isinstance(parameter.annotation, type) and issubclass(parameter.annotation, OptionGroup)
    }

    @functools.wraps(function)
    def command(**given: Any) -> int:
        for name, group in groups.items():
            own = {field.name: given.pop(field.name) for field in fields(group)}
            given[name] = group(**own)
        return function(**given)

    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if name in groups:
            parameters += _options(groups[name])
        else:
            parameters.append(parameter.replace(kind=KEYWORD))
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _options(group: type[OptionGroup]) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        kind, option = get_args(hints[field.name])
        option = copy(option)
        option.rich_help_panel = group.PANEL
        annotation = ANNOTATED[kind, option]
        yield inspect.Parameter(field.name, KEYWORD, default=field.default, annotation=annotation)
