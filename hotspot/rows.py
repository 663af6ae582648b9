"""The rows of a ranking: kernel families, fusion chains, copies and idle time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from patcher.bench import Op, load_ops
from patcher.hotspot.bound import Bound
from patcher.hotspot.chains import Chain, Place
from patcher.hotspot.coverage import by_symbols, costs, fits_module
from patcher.hotspot.names import family, printable
from patcher.hotspot.profile import Counters, Gpu, Hotspot, KernelStat, Variant
from patcher.hotspot.roofline import REACHABLE, ServedModel, completed, cost_of, speed_of_light_ns
from patcher.hotspot.stats import Spans
from patcher.hotspot.step_roles import main_roles
from patcher.hotspot.triage import triage

MOSTLY = 0.5
"""If one chain holds more than this share of a row's time, the chain is the target."""
_MOST_PCT = 99900.0
"""The ceiling of a hotspot that takes all of the time."""


class Ranking:
    """Ranks one device's kernels, or those of several added up."""

    def __init__(
        self,
        texts: Sequence[str],
        gpu: Gpu | None,
        kernels: Sequence[KernelStat],
        spans: Spans | None,
        served: ServedModel,
        counters: Mapping[str, Counters],
        steps: int | None,
        bound: Bound | None,
    ) -> None:
        self.texts = texts
        self.kernels, self.spans, self.served, self.steps = kernels, spans, served, steps
        self.counters, self.bound = counters, bound
        self.gpu = completed(gpu)
        self.roles: Mapping[str, str] = {}
        """The role of each kernel of the usual step, the one of most time."""
        often = [k.min_ns for k in kernels if k.min_ns and k.instances > 2]
        self.floor_ns = min(often, default=None)

    def rows(
        self,
        places: Sequence[Place] = (),
        chains: Sequence[Chain] = (),
        merged: Sequence[Hotspot] = (),
        cut: int = 0,
    ) -> tuple[Hotspot, ...]:
        """All rows, the largest first, each with its triage.

        Args:
            places: the launches of a step.
            chains: the chains among them.
            merged: rows of chains that were added up over devices.
            cut: steps that the launches were cut into; the caller may have told another number.
        """
        order = [(printable(self.texts[place.name]), place.mean_ns) for place in places]
        self.roles = main_roles(order)
        families: dict[str, list[KernelStat]] = {}
        for kernel in self.kernels:
            families.setdefault(family(kernel.name), []).append(kernel)
        spots = [self._kernel(name, variants) for name, variants in families.items()]
        spots += [self._chain(places, chain, cut) for chain in chains]
        spots += [self._added(chain) for chain in merged]
        spots += self._rest()
        spots.sort(key=lambda spot: (-(spot.exposed_ns or 0), -spot.total_ns, spot.name))
        home = self._homes(places, chains)
        ranking = []
        for rank, spot in enumerate(spots, 1):
            decision, reason = triage(
                spot, home.get(spot.name) if spot.kind == "kernel" else None, self.bound
            )
            ranking.append(
                spot.model_copy(update={"rank": rank, "triage": decision, "reason": reason})
            )
        return tuple(ranking)

    def _kernel(self, name: str, variants: Sequence[KernelStat]) -> Hotspot:
        first = variants[0]
        instances = sum(kernel.instances for kernel in variants)
        total = sum(kernel.total_ns for kernel in variants)
        own = sum(kernel.exposed_ns or 0 for kernel in variants) if self.spans else None
        names = [kernel.name for kernel in variants]
        op, points, refusal = self._place(names)
        instead, elsewhere = (None, ()) if op or refusal else self._instead(names)
        whole = self.spans.busy if self.spans else sum(k.total_ns for k in self.kernels)
        spent = own if own is not None else total
        spot = Hotspot(
            rank=0,
            name=name if len(variants) > 1 else first.name,
            share_pct=100 * spent / whole if whole else 0.0,
            exposed_ns=own,
            total_ns=total,
            origin=first.origin,
            operation=first.operation,
            op=op.name if op else None,
            instead=instead.name if instead else None,
            patch_points=points or elsewhere,
            refusal=refusal,
            ceiling_pct=self._gain_pct(spent),
            wall_pct=self._of_wall(own),
            instances=instances,
            mean_ns=total / instances,
            variants=tuple(_variant(k) for k in variants) if len(variants) > 1 else (),
            per_step=self._per_step(instances),
            per_layer=self._per_layer(instances),
        )
        counted = self._counted(variants)
        if counted is not None:
            peaks = {
                "dram_pct": counted.dram_throughput_pct,
                "sm_pct": counted.sm_throughput_pct,
            }
            spot = spot.model_copy(update=peaks)
        own_cost = op if op is not None and costs(op.name, first.name) else None
        cost = cost_of(own_cost, counted, self.served, first.name)
        if cost is None:
            return spot
        update: dict[str, object] = {
            "bytes": cost.bytes,
            "flops": cost.flops,
            "cost_source": cost.source,
        }
        if (least := speed_of_light_ns(cost, self.gpu)) is not None:
            aim = max(least / REACHABLE, self.floor_ns or 0)
            update |= {
                "speed_of_light_ns": least,
                "sol_pct": min(100 * least / spot.mean_ns, 100.0) if spot.mean_ns else None,
                "reachable_pct": self._gain_pct(max(spent - instances * aim, 0.0)),
            }
        return spot.model_copy(update=update)

    def _place(self, names: Iterable[str]) -> tuple[Op | None, tuple[str, ...], str]:
        """The first op that covers these kernels and has a place in the model, and where; or why
        none has."""
        refusals: list[str] = []
        ops = (op for name in names for op in by_symbols(name, self.roles.get(name)))
        for op in dict.fromkeys(ops):
            points, refusal = self.served.places_of(op)
            if not refusal:
                return op, points, ""
            refusals.append(f"{op.name}: {refusal}")
        return None, (), "; ".join(refusals)

    def _instead(self, names: Sequence[str]) -> tuple[Op | None, tuple[str, ...]]:
        """An op whose point in this model takes the place of these kernels with others, or in some
        layers, and where."""
        if self.served.places is None:
            return None, ()
        for op in load_ops().values():
            fitting = {
                f"{point.engine}: {point.point}"
                for point in op.contract.patch_points
                if point.replaces and all(re.search(point.replaces, name) for name in names)
            }
            if not fitting or not all(self._may_be(op, name) for name in names):
                continue
            points, refusal = self.served.places_of(op)
            where = tuple(point for point in points if point in fitting)
            if where and not refusal:
                return op, where
        return None, ()

    def _may_be(self, op: Op, kernel: str) -> bool:
        role = self.roles.get(kernel)
        return role is None or fits_module(op.name, role)

    def _chain(self, places: Sequence[Place], chain: Chain, cut: int) -> Hotspot:
        """A chain's row: its launches and the idle time between them, not before the first.

        It is what the usual step has, times the steps; where others have less, at most what its
        kernels took.
        """
        assert self.spans is not None
        points, refusal = self.served.places_of(load_ops().get(chain.as_one or ""))
        members = [places[i] for i in chain.places()]
        begins = {begin for begin, _ in chain.runs}
        gap = cut * sum(places[i].gap_ns for i in chain.places() if i not in begins)
        spent = cut * sum(place.exposed_ns for place in members)
        longest = cut * sum(max(p.mean_ns for p in places[begin:end]) for begin, end in chain.runs)
        names = Counter(printable(self.texts[place.name]) for place in members)
        known = {kernel.name: kernel for kernel in self.kernels}
        kinds = [known[name] for name in names if name in known]
        total = dict.fromkeys(names, 0.0)
        for place in members:
            total[printable(self.texts[place.name])] += cut * place.mean_ns
        variants = tuple(
            Variant(
                name=kernel.name,
                instances=min(cut * names[kernel.name], kernel.instances),
                total_ns=min(round(total[kernel.name]), kernel.total_ns),
            )
            for kernel in kinds
        )
        spent = min(spent, sum(kernel.exposed_ns or 0 for kernel in kinds))
        gap = min(round(gap), self.spans.wall - self.spans.busy)
        own_ns = round(spent) + gap
        instances = len(chain.runs) * cut
        return Hotspot(
            rank=0,
            name=chain.name,
            kind="chain",
            share_pct=100 * spent / self.spans.busy if self.spans.busy else 0.0,
            wall_pct=self._of_wall(own_ns),
            exposed_ns=own_ns,
            total_ns=sum(variant.total_ns for variant in variants),
            origin=" + ".join(dict.fromkeys(kernel.origin for kernel in kinds)),
            operation=" + ".join(dict.fromkeys(kernel.operation for kernel in kinds)),
            op=None,
            as_one=None if refusal else chain.as_one,
            patch_points=points,
            refusal=f"{chain.as_one}: {refusal}" if refusal else "",
            ceiling_pct=self._gain_pct(own_ns),
            reachable_pct=self._gain_pct(max(own_ns - longest, 0.0)),
            instances=instances,
            mean_ns=own_ns / instances,
            variants=variants,
            gap_ns=gap,
            per_step=self._per_step(instances),
            per_layer=self._per_layer(instances),
        )

    def _added(self, chain: Hotspot) -> Hotspot:
        """A chain's row added up over devices, as a share of their sum."""
        assert self.spans is not None
        own = chain.exposed_ns or 0
        busy = own - chain.gap_ns
        return chain.model_copy(
            update={
                "share_pct": 100 * busy / self.spans.busy if self.spans.busy else 0.0,
                "wall_pct": self._of_wall(own),
                "ceiling_pct": self._gain_pct(own),
                "mean_ns": own / chain.instances,
                "per_step": self._per_step(chain.instances),
                "per_layer": self._per_layer(chain.instances),
            }
        )

    def _rest(self) -> list[Hotspot]:
        """The rows of copies and fills and of idle time."""
        if self.spans is None:
            return []
        idle = self.spans.wall - self.spans.busy - self.spans.memory
        rows = []
        for kind, name, spent, instances in (
            ("memory", "copies and fills", self.spans.memory, 1),
            ("idle", "GPU idle between launches", idle, max(self.spans.waits, 1)),
        ):
            if spent > 0:
                rows.append(
                    Hotspot(
                        rank=0,
                        name=name,
                        kind=kind,  # type: ignore[arg-type]
                        share_pct=0.0,
                        wall_pct=self._of_wall(spent),
                        exposed_ns=spent,
                        total_ns=spent,
                        origin="-",
                        operation=kind,
                        op=None,
                        ceiling_pct=self._gain_pct(spent),
                        instances=instances,
                        mean_ns=spent / instances,
                    )
                )
        return rows

    def _gain_pct(self, saved_ns: float) -> float:
        """End-to-end gain in percent if that much time were saved."""
        whole = self.spans.wall if self.spans else sum(k.total_ns for k in self.kernels)
        share = saved_ns / whole if whole else 0.0
        return 100 * share / (1 - share) if share < 0.999 else _MOST_PCT

    def _of_wall(self, spent: int | None) -> float | None:
        if self.spans is None or spent is None or not self.spans.wall:
            return None
        return 100 * spent / self.spans.wall

    def _per_step(self, instances: int) -> float | None:
        return instances / self.steps if self.steps else None

    def _per_layer(self, instances: int) -> float | None:
        layers = self.served.layers
        return instances / self.steps / layers if self.steps and layers else None

    def _counted(self, variants: Sequence[KernelStat]) -> Counters | None:
        """Nsight Compute's counters of the first variant that has any."""
        return next((self.counters[k.name] for k in variants if k.name in self.counters), None)

    def _homes(self, places: Sequence[Place], chains: Sequence[Chain]) -> dict[str, str]:
        """The chain that holds most of each family's time, if there is one."""
        spent: dict[str, float] = {}
        inside: dict[tuple[str, str], float] = {}
        for place in places:
            name = family(printable(self.texts[place.name]))
            spent[name] = spent.get(name, 0.0) + place.exposed_ns
        for chain in chains:
            for index in chain.places():
                key = (family(printable(self.texts[places[index].name])), chain.name)
                inside[key] = inside.get(key, 0.0) + places[index].exposed_ns
        return {name: chain for (name, chain), own in inside.items() if own > MOSTLY * spent[name]}


def _variant(kernel: KernelStat) -> Variant:
    return Variant(name=kernel.name, instances=kernel.instances, total_ns=kernel.total_ns)
