"""Measure several patches, each alone and all together, and choose the best set.

If each arm is a process, all combinations are measured in blocks against a shared baseline, as many
at once as fit (`session.py`). Otherwise each is a separate A/B (`compare.py`). Results are saved in
a folder, so that a second start continues where the first one stopped.

In a block the combinations share the baseline's windows, so their comparisons are dependent. Holm's
correction allows any dependence. The test whether a part of the best set is equally good assumes
independence (`best_set._as_good`); with shared windows it errs towards the smaller set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from patcher.ab.best_set import BestSet, Combination, best_set
from patcher.ab.compare import compare_patches
from patcher.ab.job import ABJob
from patcher.ab.measurement import Measurement
from patcher.ab.record_files import read_record, write_record
from patcher.ab.result import ABResult
from patcher.ab.session import compare_sets
from patcher.ab.verdict import refuse_one_point_twice, result_of
from patcher.bench import SCHEMA_VERSION, Record, UsageError
from patcher.bench.ab.phases import ABPhase, ABProgress
from patcher.integrate import Patch

CompareOne = Callable[[ABJob, Sequence[Path], ABProgress], tuple[Measurement, ...]]
"""As `patcher.ab.compare.compare_patches`."""
CompareSets = Callable[
    [ABJob, Mapping[str, Sequence[Patch]], Path, ABProgress],
    dict[str, tuple[Measurement, ...]] | None,
]
"""As `patcher.ab.session.compare_sets`."""


class SetSearch(Record):
    """All measurements, and the best set."""

    schema_version: int = SCHEMA_VERSION
    best: BestSet
    measured: tuple[ABResult, ...]


def combination_of(result: ABResult) -> Combination:
    """The comparison, with the rule's verdict if that is stricter."""
    comparison = result.measured[0].throughput.comparison
    decision = result.decision
    if comparison.verdict == "accept" and decision.verdict != "accept":
        said = {"verdict": decision.verdict, "reason": "; ".join(decision.reasons)}
        comparison = comparison.model_copy(update=said)
    return Combination(patches=result.patches, comparison=comparison)


def find_best_set(
    job: ABJob,
    folders: Sequence[Path],
    keep: Path,
    progress: ABProgress,
    compare_one: CompareOne = compare_patches,
    compare_shared: CompareSets = compare_sets,
) -> SetSearch:
    """Measure each patch alone and all together. If all together are no better than the best one
    alone, also all but one each. What `keep` already holds is not measured again.

    Raises:
        UsageError: there are fewer than two patches, one occurs twice, or two have the same patch
            point.
        VerificationError: a file of `keep` is damaged.
        PatcherError: as `patcher.ab.compare.compare_patches` and `patcher.ab.session.compare_sets`.
    """
    patches = [Patch.load(folder) for folder in folders]
    if len(patches) < 2:
        raise UsageError("one patch is no set", "give --patch twice or more")
    refuse_one_point_twice(patches)
    keep.mkdir(parents=True, exist_ok=True)
    of_id = dict(zip((patch.manifest.id for patch in patches), folders, strict=True))
    search = _Search(job, of_id, keep, progress, compare_one, compare_shared)
    done, names = search.done, list(of_id)
    search.measure([*((name,) for name in names), tuple(names)])
    if len(names) > 2 and _worse_together(done, names):
        search.measure(list(combinations(names, len(names) - 1)))
    measured = tuple(done.values())
    return SetSearch(best=best_set([combination_of(one) for one in measured]), measured=measured)


def reported(found: SetSearch) -> ABResult:
    """The subject of a report: the best set, or all patches if none is accepted."""
    by_set = {frozenset(one.patches): one for one in found.measured}
    best = by_set.get(frozenset(found.best.patches))
    return best or max(found.measured, key=lambda one: len(one.patches))


def folder_name(job: ABJob, folders: Sequence[Path]) -> str:
    """The key of a folder for these patches and this job."""
    digests = sorted(Patch.load(folder).digest for folder in folders)
    text = job.model_dump_json() + ",".join(digests)
    return f"best-set-{_digest(text)}"


@dataclass
class _Search:
    """The measured combinations, of those requested."""

    job: ABJob
    of_id: dict[str, Path]
    keep: Path
    progress: ABProgress
    compare_one: CompareOne
    compare_shared: CompareSets
    done: dict[frozenset[str], ABResult] = field(default_factory=dict)
    one_by_one: bool = False

    def measure(self, plan: Sequence[tuple[str, ...]]) -> None:
        """The measurement of each combination, from the folder or measured now."""
        for chosen in plan:
            path = self._path(chosen)
            if path.is_file():
                hint = "remove it to measure that combination again"
                self.done[frozenset(chosen)] = read_record(path, ABResult, hint)
        missing = [chosen for chosen in plan if frozenset(chosen) not in self.done]
        if missing and self.job.process_pairs and not self.one_by_one:
            self._measure_in_blocks(plan, missing)
        for chosen in plan:
            if frozenset(chosen) not in self.done:
                self._keep(chosen, self._alone(chosen))

    def _measure_in_blocks(
        self, plan: Sequence[tuple[str, ...]], missing: Sequence[tuple[str, ...]]
    ) -> None:
        folder = self.keep / f"waves-{_digest(','.join(map(_named, plan)))}"
        sets = {
            _named(chosen): [Patch.load(self.of_id[patch]) for patch in chosen]
            for chosen in missing
        }
        found = self.compare_shared(self.job, sets, folder, self.progress)
        if found is None:
            self.one_by_one = True
            return
        for chosen in missing:
            self._keep(chosen, found[_named(chosen)])

    def _alone(self, chosen: tuple[str, ...]) -> tuple[Measurement, ...]:
        def told(phase: ABPhase, said: str, done: int, total: int) -> None:
            self.progress(phase, f"{_named(chosen)}: {said}", done, total)

        return self.compare_one(self.job, [self.of_id[patch] for patch in chosen], told)

    def _keep(self, chosen: tuple[str, ...], measured: tuple[Measurement, ...]) -> None:
        found = result_of([Patch.load(self.of_id[patch]) for patch in chosen], measured)
        write_record(self._path(chosen), found)
        self.done[frozenset(chosen)] = found

    def _path(self, chosen: tuple[str, ...]) -> Path:
        return self.keep / f"{_digest('+'.join(chosen))}.json"


def _named(chosen: Sequence[str]) -> str:
    """The name of patches that are installed together, as in `Throughput.patch`."""
    return " + ".join(chosen)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _worse_together(done: dict[frozenset[str], ABResult], names: Sequence[str]) -> bool:
    """Whether all together are not accepted, or gain less than the best one alone."""
    whole = combination_of(done[frozenset(names)]).comparison
    alone = [combination_of(done[frozenset({name})]).comparison for name in names]
    accepted = [one.gain_pct for one in alone if one.verdict == "accept"]
    return whole.verdict != "accept" or whole.gain_pct < max(accepted, default=-100.0)
