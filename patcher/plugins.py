"""What other packages add to patcher here, for a listing: each thing, where from, what is wrong."""

from __future__ import annotations

from patcher.bench import MissingError, Plugin, plugins, preset_problems
from patcher.integrate import names_taken


def found_plugins() -> list[Plugin]:
    """Everything that other packages bring. Each is imported to find out what is wrong with it."""
    return [_looked_into(plugin) for plugin in plugins()]


def _looked_into(plugin: Plugin) -> Plugin:
    """With what only its kind can tell."""
    problem = plugin.problem
    if not problem and plugin.group == "patcher.presets":
        problem = preset_problems().get(plugin.target, "")
    if not problem and plugin.group == "patcher.patch_points":
        try:
            if taken := names_taken(plugin.target):
                problem = f"patcher has patch points of these names: {', '.join(taken)}"
        except MissingError as error:
            problem = error.message
    return plugin.model_copy(update={"problem": problem})
