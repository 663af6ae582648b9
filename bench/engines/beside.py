"""How an engine loads beside another one of its kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from packaging.specifiers import SpecifierSet

from patcher.bench.engines import ENGINES, cache_argument
from patcher.bench.workload import Shape, Workload


def arguments_beside(
    workload: Workload, room: Sequence[Shape], share: float, versions: Iterable[str | None]
) -> dict[str, Any]:
    """Arguments with which an engine loads beside another one, serves that traffic in a share of
    the device's memory, and compiles what it would without them; none where they are not known.

    Args:
        versions: of the engine, of all that load; None: not known.

    Raises:
        UsageError, MissingError: as `Registry.load`.
    """
    factory: Any = ENGINES.load(workload.engine)
    name, cache = getattr(factory, "share_argument", ""), cache_argument(workload.engine)
    alike = SpecifierSet(getattr(factory, "compiles_alike", ""), prereleases=True)
    if not name or not cache or any(one is None or one not in alike for one in versions):
        return {}
    size = factory.cache_size(workload, room)
    return {} if size is None else {name: share, cache: size}
