from collections.abc import Iterable, Mapping
from pathlib import Path

from hotspot.profile import Counters


def read_ncu(path: Path) -> dict[str, Counters]: ...
def attach(
    c: Mapping[str, Counters], n: Iterable[str]
) -> tuple[dict[str, Counters], tuple[str, ...]]: ...
