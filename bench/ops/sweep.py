"""One problem of an op, and the problems that a kernel is timed on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from patcher.bench.records import Record


class Point(Record):
    """One concrete problem: a size for every axis, a dtype for every symbol."""

    axes: dict[str, int]
    dtypes: dict[str, str]

    def label(self) -> str:
        axes = " ".join(f"{name}={size}" for name, size in self.axes.items())
        return f"{axes} {'/'.join(dict.fromkeys(self.dtypes.values()))}"


SIZED = "@"
"""In a sweep's name, between that in the contract and the sizes that differ from it."""


class Sweep(Record):
    name: str
    """As in the contract; with other sizes, `NAME@AXIS=SIZE,SYMBOL=DTYPE`, and `SIZE:SIZE` for the
    swept axis."""
    device: Literal["cpu", "cuda"]
    dtypes: dict[str, str]
    axis: str
    values: tuple[int, ...]
    fixed: dict[str, int]

    def sized(
        self, sizes: Mapping[str, int], dtypes: Mapping[str, str], values: Sequence[int] = ()
    ) -> Sweep:
        """The sweep with other sizes and dtypes, as its name then says: `bf16@hidden=4096`.

        Args:
            sizes: by axis; axes that the sweep does not fix are left out.
            dtypes: by symbol.
            values: of the swept axis; none: as they are.
        """
        axes = {axis: sizes.get(axis, size) for axis, size in self.fixed.items()}
        kinds, swept = {**self.dtypes, **dtypes}, tuple(values) or self.values
        changed = [f"{axis}={size}" for axis, size in axes.items() if size != self.fixed[axis]]
        changed += [f"{name}={kind}" for name, kind in kinds.items() if kind != self.dtypes[name]]
        changed += [f"{self.axis}={':'.join(map(str, swept))}"] if swept != self.values else []
        name = f"{self.name}{SIZED}{','.join(changed)}" if changed else self.name
        update = {"name": name, "fixed": axes, "dtypes": kinds, "values": swept}
        return self.model_copy(update=update)

    def points(self) -> list[Point]:
        return [
            Point(axes={self.axis: value, **self.fixed}, dtypes=self.dtypes)
            for value in self.values
        ]
