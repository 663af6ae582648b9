"""Table of every dtype that a contract may name: its format, and its names in the languages.

A name is torch's attribute. A *narrow* dtype has at most 8 bits per number and no arithmetic in
torch: `codes.py` decodes and encodes it. Formats: OCP "8-bit Floating Point Specification" 1.0 and
"Microscaling Formats" 1.0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from patcher.bench.ops.contract import Contract, Sweep

Tolerance = Literal["exact", "rounded", "narrow"]
"""How the judge compares. `exact`: integers, which must be equal. `rounded`: floats, by their error
against float64. `narrow`: likewise after decoding, whatever the bits."""


@dataclass(frozen=True)
class Dtype:
    """One row of the table."""

    name: str
    """Name of torch's attribute."""
    bits: int
    """Bits per number."""
    tolerance: Tolerance
    finite_max: float
    eps: float = 0.0
    """The distance from 1 to the next number; 0 for integers."""
    smallest_normal: float = 0.0
    smallest: float = 0.0
    """The smallest positive number."""
    numbers: int = 1
    """Numbers in one item of torch's tensor: 2 if a byte packs two along the last axis, the first
    in the lower half."""
    signed: bool = True
    infinite: bool = False
    """Whether it has infinities; otherwise larger values become the largest number."""
    nan: bool = False
    """Whether it has a NaN."""
    bias: int = 0
    """Exponent bias of a narrow dtype."""
    mantissa: int = 0
    """Bits of a narrow dtype's mantissa."""
    cuda: str = ""
    """CUDA's type of a narrow dtype's item, and its header."""
    triton: str = ""
    """Triton's type of a narrow dtype's item; `tl.uint8`: it has none, so its bytes are viewed."""
    metal: str | None = None
    """Metal's type, if there is one."""

    @property
    def wide_mantissa(self) -> int:
        """Stored bits of the mantissa of a floating-point number of 16 bits or more, else 0."""
        return 0 if self.narrow or not self.eps else round(-math.log2(self.eps))

    @property
    def item_bytes(self) -> int:
        """Bytes of one item."""
        return self.bits * self.numbers // 8

    @property
    def narrow(self) -> bool:
        return self.tolerance == "narrow"

    @property
    def exact(self) -> bool:
        """Whether it holds integers, which are compared exactly."""
        return self.tolerance == "exact"

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        found: torch.dtype = getattr(torch, self.name)
        return found

    @property
    def dlpack(self) -> str:
        """The code of a narrow dtype in `dlpack.h`."""
        return f"kDL{self.name.removesuffix('_x2').capitalize()}"

    @property
    def layout(self) -> str:
        """A narrow dtype's format in words, for languages without a type for it."""
        if not self.signed:
            return f"the number is 2^(byte - {self.bias}), 255 is NaN"
        exponent = self.bits - 1 - self.mantissa
        least = f"2^{1 - self.bias}"
        special = {
            (False, False): "no infinity and no NaN",
            (False, True): f"no infinity, NaN is 0x{(1 << self.bits - 1) - 1:x} with either sign",
            (True, True): "infinities and NaN as in IEEE 754",
        }[self.infinite, self.nan]
        packed = "; two in a byte, the first in the lower half" if self.numbers == 2 else ""
        return (
            f"sign, {exponent} bits of exponent (bias {self.bias}), {self.mantissa} of mantissa, "
            f"subnormal below {least}, at most {self.finite_max:g}, {special}{packed}"
        )


_TABLE = (
    Dtype(
        name="float64",
        bits=64,
        tolerance="rounded",
        finite_max=1.7976931348623157e308,
        eps=2.0**-52,
        smallest_normal=2.0**-1022,
        smallest=2.0**-1074,
        infinite=True,
        nan=True,
    ),
    Dtype(
        name="float32",
        bits=32,
        tolerance="rounded",
        finite_max=(2 - 2.0**-23) * 2.0**127,
        eps=2.0**-23,
        smallest_normal=2.0**-126,
        smallest=2.0**-149,
        infinite=True,
        nan=True,
        metal="float",
    ),
    Dtype(
        name="bfloat16",
        bits=16,
        tolerance="rounded",
        finite_max=(2 - 2.0**-7) * 2.0**127,
        eps=2.0**-7,
        smallest_normal=2.0**-126,
        smallest=2.0**-133,
        infinite=True,
        nan=True,
        metal="bfloat",
    ),
    Dtype(
        name="float16",
        bits=16,
        tolerance="rounded",
        finite_max=65504.0,
        eps=2.0**-10,
        smallest_normal=2.0**-14,
        smallest=2.0**-24,
        infinite=True,
        nan=True,
        metal="half",
    ),
    Dtype(
        name="float8_e4m3fn",
        bits=8,
        tolerance="narrow",
        finite_max=448.0,
        eps=2.0**-3,
        smallest_normal=2.0**-6,
        smallest=2.0**-9,
        nan=True,
        bias=7,
        mantissa=3,
        cuda="__nv_fp8_e4m3 (cuda_fp8.h)",
        triton="tl.float8e4nv",
    ),
    Dtype(
        name="float8_e5m2",
        bits=8,
        tolerance="narrow",
        finite_max=57344.0,
        eps=2.0**-2,
        smallest_normal=2.0**-14,
        smallest=2.0**-16,
        infinite=True,
        nan=True,
        bias=15,
        mantissa=2,
        cuda="__nv_fp8_e5m2 (cuda_fp8.h)",
        triton="tl.float8e5",
    ),
    Dtype(
        name="float8_e8m0fnu",
        bits=8,
        tolerance="narrow",
        finite_max=2.0**127,
        eps=1.0,
        smallest_normal=2.0**-127,
        smallest=2.0**-127,
        signed=False,
        nan=True,
        bias=127,
        cuda="__nv_fp8_e8m0 (cuda_fp8.h)",
        triton="tl.uint8",
    ),
    Dtype(
        name="float4_e2m1fn_x2",
        bits=4,
        numbers=2,
        tolerance="narrow",
        finite_max=6.0,
        eps=2.0**-1,
        smallest_normal=1.0,
        smallest=0.5,
        bias=1,
        mantissa=1,
        cuda="__nv_fp4x2_e2m1 (cuda_fp4.h)",
        triton="tl.uint8",
    ),
    Dtype(
        name="int64",
        bits=64,
        tolerance="exact",
        finite_max=2.0**63,
        metal="long",
    ),
    Dtype(
        name="int32",
        bits=32,
        tolerance="exact",
        finite_max=2.0**31 - 1,
        metal="int",
    ),
    Dtype(
        name="uint8",
        bits=8,
        tolerance="exact",
        finite_max=255.0,
        signed=False,
        metal="uchar",
    ),
)
DTYPES = {dtype.name: dtype for dtype in _TABLE}
"""By name."""


def dtype_of(value: torch.dtype) -> Dtype:
    """The row of torch's dtype.

    Raises:
        KeyError: the table has none.
    """
    return DTYPES[str(value).removeprefix("torch.")]


def dtypes_in(dtype: str, sweep: Sweep, contract: Contract) -> dict[str, str]:
    """A sweep's dtypes where the model runs in `dtype`: it takes the place of the first symbol's,
    and of those that are the same. As the sweep has them if the contract does not allow that.
    """
    usual = sweep.dtypes[next(iter(contract.dtypes))]
    found = {name: dtype if now == usual else now for name, now in sweep.dtypes.items()}
    return found if found in contract.dtype_choices() else sweep.dtypes
