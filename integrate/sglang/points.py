"""The patch points of SGLang by name; importing them does not import SGLang.

`python -m patcher.integrate.sglang.points` compares a SGLang with the versions read: see
`patcher.integrate.review`.
"""

from __future__ import annotations

from patcher.integrate.sglang.add_norm import SglangAddNorm
from patcher.integrate.sglang.linear import SglangLinear
from patcher.integrate.sglang.point import SglangPoint
from patcher.integrate.sglang.rope_kv import SglangRopeKv

POINTS: dict[str, type[SglangPoint]] = {
    point.name: point for point in (SglangAddNorm, SglangRopeKv, SglangLinear)
}


if __name__ == "__main__":
    from patcher.integrate.review import main
    from patcher.integrate.sglang.sources import RECORD

    raise SystemExit(main(POINTS, RECORD))
