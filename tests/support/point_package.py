"""The module of a package that brings a patch point."""

from __future__ import annotations

_MODULE = """
from patcher.bench import PatchPointSpec


class Point:
    engine, name, op = "{engine}", "{name}", "fused_add_rms_norm"
    fingerprint = find = install = remove = None
    spec = PatchPointSpec(
        engine=engine, versions=">=5", point=name, summary="mine", calls_per_layer=2
    )

    def __init__(self, target=None): ...

    @classmethod
    def of_model(cls, config):
        return config.model_type


POINTS = {{Point.name: Point}}
"""


def point_package(engine: str, name: str) -> str:
    """Its source; `POINTS` is what its entry point names."""
    return _MODULE.format(engine=engine, name=name)
