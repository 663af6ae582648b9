"""Run a problem file and write its trace."""

from __future__ import annotations

import inspect
import json
import sys
from typing import Any

from .graph import Graph
from .trials import OwnAxes
from .values import Unfit, literal


def main() -> None:
    import torch

    source, target = sys.argv[1:3]
    try:
        found = trace(source)
    except Unfit as reason:
        found = {"refused": str(reason)}
    except (Exception, torch.jit.Error) as error:  # a stranger's code may raise anything
        found = {"refused": f"{type(error).__name__}: {error}"[:600]}
    with open(target, "w", encoding="utf-8") as file:
        json.dump(found, file, allow_nan=False)


def trace(path: str) -> dict[str, Any]:
    import torch

    names: dict[str, Any] = {"__name__": "problem", "__file__": path}
    with open(path, encoding="utf-8") as file:
        exec(compile(file.read(), path, "exec"), names)
    for name in ("Model", "get_inputs", "get_init_inputs"):
        if name not in names:
            raise Unfit(f"it defines no {name}")
    torch.manual_seed(0)
    init, inputs = list(names["get_init_inputs"]()), list(names["get_inputs"]())
    keywords = {}
    if len(init) == 2 and isinstance(init[0], list) and isinstance(init[1], dict):
        init, keywords = init
    module = names["Model"](*init, **keywords)
    inputs = given(module, inputs)
    program = exported(module, inputs, names.get("FREE_AXES"))
    found = Graph(program, module, inputs, names.get("FREE_AXES"))
    return {
        "init": [literal(each) for each in init],
        "keywords": {name: literal(each) for name, each in keywords.items()},
        **found.told(),
    }


def given(module: Any, inputs: list[Any]) -> list[Any]:
    """The inputs, none of which shares its memory with another: the graph would read one twice."""
    import torch

    taken = inspect.signature(module.forward).parameters
    if any(each.kind is each.VAR_POSITIONAL for each in taken.values()):
        raise Unfit("its forward takes any number of inputs (*), and an op names each")
    if len(inputs) > len(taken):
        raise Unfit(f"get_inputs gives {len(inputs)} values and forward names {len(taken)}")
    seen: set[int] = set()
    for index, (name, each) in enumerate(zip(taken, inputs, strict=False)):
        if isinstance(each, list | tuple | dict):
            raise Unfit(f"get_inputs gives a {type(each).__name__} for {name}, not a tensor")
        if isinstance(each, torch.Tensor):
            place = each.untyped_storage().data_ptr()
            inputs[index] = each.clone() if place in seen else each
            seen.add(place)
    return inputs


def exported(module: Any, inputs: list[Any], free_axes: OwnAxes | None = None) -> Any:
    """The module's graph, with all sizes free, or only the first of each input, or none.

    Args:
        free_axes: those that may be free, and what they are, by the names of inputs; None: all.
    """
    import torch
    from torch.export import Dim

    def free(name: str, value: Any, axes: int) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        known = range(min(axes, value.dim()))
        mine = known if free_axes is None else [each for each in free_axes[name] if each in known]
        return dict.fromkeys(mine, Dim.AUTO) or None

    names = list(inspect.signature(module.forward).parameters)[: len(inputs)]
    last: Exception | None = None
    for axes in (99, 1, 0):
        shapes = {name: free(name, each, axes) for name, each in zip(names, inputs, strict=True)}
        try:
            with torch.no_grad():
                program = torch.export.export(module, tuple(inputs), dynamic_shapes=shapes)
                return program.run_decompositions({})
        except Exception as error:
            last = error
    raise Unfit(f"torch.export cannot trace it: {str(last)[:400]}")


if __name__ == "__main__":
    main()
