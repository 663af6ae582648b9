"""Columns of precision: in which arithmetic an imported module runs. They are never mixed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from patcher.integrate.formats.foreign_contract import FLOATS

SUPPORTED = ("float32", "int64", "int32")
AS_GIVEN = "as given"


@dataclass(frozen=True)
class PrecisionColumn:
    """One column: in which arithmetic the baselines run, and so which error is allowed."""

    suffix: str
    number: str
    """torch's dtype in which the baselines compute."""
    tf32: bool
    bits: int
    """Bits of mantissa of the planted control, which the judge must reject."""
    said: str
    supported: tuple[str, ...] = SUPPORTED
    """Dtypes of tensors."""

    @property
    def kept(self) -> bool:
        """Whether the module computes in its own dtypes, not all in `number`."""
        return self.number == AS_GIVEN


def as_given(dtypes: Iterable[str]) -> PrecisionColumn:
    """The column of a module with dtypes of its own, which are those of its tensors."""
    found = set(dtypes)
    bits = 4 if "bfloat16" in found else 6 if "float16" in found else 8
    said = "each dtype as the module has it, with TF32 off: at most the module's own error"
    return PrecisionColumn("", AS_GIVEN, False, bits, said, (*FLOATS, "int64", "int32"))


PRECISIONS = {
    "fp32": PrecisionColumn("", "float32", False, 8, "float32 as given, with TF32 off"),
    "tf32": PrecisionColumn(
        "_tf32",
        "float32",
        True,
        8,
        "float32 with TF32 allowed in matrix products; a narrower type, such as float16, is "
        "another column, whatever its error",
    ),
    "bf16": PrecisionColumn(
        "_bf16",
        "bfloat16",
        False,
        4,
        "bfloat16 inside, float32 at the boundary: at most the "
        "error of the module itself in bfloat16",
    ),
    "fp16": PrecisionColumn(
        "_fp16",
        "float16",
        False,
        6,
        "float16 inside, float32 at the boundary: at most the "
        "error of the module itself in float16",
    ),
}
