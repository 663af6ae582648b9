"""Sets of patches in shared blocks: what belongs to which set, what a folder keeps. With a double
for the processes, and once with real ones.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from machine_doubles import Machine, Named, NamedSide
from measure_sample import WORKLOAD
from measure_sets_sample import OPS, bundles, ids
from patch_sample import evaluation
from process_doubles import ScriptedSide

from patcher import bench
from patcher.ab import arm_protocol as say
from patcher.ab import launcher, session
from patcher.ab.job import ABJob
from patcher.ab.launcher import with_cache_size
from patcher.ab.measurement import Measurement
from patcher.ab.receipt_counts import called_between
from patcher.ab.session import PATCHED, PatchSession, compare_in_pairs, compare_sets
from patcher.ab.set_search import SetSearch, combination_of, find_best_set
from patcher.bench import Language, Shape
from patcher.bench.ab.blocks import BASELINE, CONTROL
from patcher.bench.ab.phases import silent
from patcher.bench.ab.processes import ABPlan
from patcher.bench.ab.windows import Taken
from patcher.bench.engines.vllm import cache_bytes
from patcher.bench.machine.clocks import ClockMonitor
from patcher.integrate import Patch, Receipt

__all__ = ("bundles",)  # a fixture of tests here

NORM, ROPE, ROUTE = OPS
JOB = ABJob(
    workload=WORKLOAD,
    process_pairs=3,
    pairs_each=9,
    quality_steps=4,
    other_workloads=(Shape(batch=1, context=4), Shape(batch=16, context=4)),
)
VOCABULARY = 50
POSITIONS = WORKLOAD.batch * 5


class ScriptedArm(Named):
    """Answers what a process of `patcher.ab.arm` is asked; speed is the machine's matter."""

    machine: Scripted

    def __init__(
        self, name: str, load: say.Load, patches: tuple[Patch, ...] = (), load_s: float = 0.0
    ) -> None:
        if name == "reference":
            self.name, self.patches, self.runs = name, (), 0
            self.machine.names.append(name)
            return
        made = self.machine.start(name, load.memory_share)
        self.__dict__ |= made.__dict__
        self.machine.open[self.machine.open.index(made)] = self
        self.patches, self.runs = patches, 0

    def side(self, shape: Shape | None = None) -> ShapedSide:
        return ShapedSide(self, shape)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return

    def receipts(self) -> tuple[Receipt, ...]:
        return tuple(
            Receipt(
                patch_id=patch.manifest.id,
                digest=patch.digest,
                pid=1,
                calls={f"kernel[{self.name}]": self.runs},
            )
            for patch in self.patches
        )

    def called_since_warm(self) -> dict[str, Receipt]:
        return called_between((), self.receipts())  # it has counted no other runs

    def ask(self, command: Any, kind: type[Any], timeout_s: float = 0) -> Any:
        rng = np.random.default_rng(len(self.name))
        match command:
            case say.Generate(steps=steps):
                tokens = [list(range(1 + steps))] * WORKLOAD.batch
                if self.name == self.machine.stays_changed:
                    tokens = [row[::-1] for row in tokens]
                return say.Generated(tokens=tokens)
            case say.AskRouting():
                return say.Entropy(percent=97.0)
            case say.Logits(path=path):
                self.runs += 1
                logits = np.random.default_rng(0).normal(size=(POSITIONS, VOCABULARY)) * 4
                if self.name != "reference":
                    logits += rng.normal(size=logits.shape) * 1e-3
                if self.machine.other_model in {one.manifest.id for one in self.patches}:
                    logits += rng.normal(size=logits.shape)
                np.save(path, logits.astype(np.float32))
                return say.Wrote(how="float64")
        raise AssertionError(command)


class ShapedSide(NamedSide):
    process: Any

    def __init__(self, process: ScriptedArm, shape: Shape | None) -> None:
        super().__init__(process)
        self.batch = WORKLOAD.batch if shape is None else shape.batch
        slower = process.machine.slower_at_16 in {one.manifest.id for one in process.patches}
        self.penalty = 1.1 if self.batch > 8 and slower else 1.0

    def prefill(self, seed: int) -> None:
        self.process.runs += 1
        super().prefill(seed)

    def end(self) -> Taken:
        taken = super().end()
        return taken._replace(
            tokens=[[1] * (1 + self.steps)] * self.batch, decode_s=taken.decode_s * self.penalty
        )


class Scripted(Machine):
    other_model = slower_at_16 = stays_changed = ""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, bundles: list[Path]) -> Iterator[Scripted]:
    made = scripted(bundles)
    monkeypatch.setattr(launcher, "ArmProcess", ScriptedArm)
    monkeypatch.setattr(session, "STAGGER_S", 0.0)
    use(monkeypatch, made)
    yield made
    assert not made.open


def use(monkeypatch: pytest.MonkeyPatch, made: Scripted) -> None:
    ScriptedSide.seeds = []
    monkeypatch.setattr(ScriptedArm, "machine", made, raising=False)


def scripted(bundles: Sequence[Path], **given: Any) -> Scripted:
    norm, rope = (Patch.load(folder).manifest.id for folder in bundles[:2])
    return Scripted({norm: 2.0, rope: 1.2, f"{norm} + {rope}": 3.2}, bias_pct=0.02, **given)


def alone(job: ABJob, folders: Sequence[Path], report: Any) -> tuple[Measurement, ...]:
    raise AssertionError("measured one by one")


def measure(bundles: Sequence[Path], keep: Path, **given: Any) -> SetSearch:
    return find_best_set(JOB, bundles[:2], keep, silent, **{"compare_one": alone, **given})


def test_each_set_has_its_own_gain_receipts_quality_and_other_points(
    machine: Scripted, bundles: list[Path], tmp_path: Path
) -> None:
    found = measure(bundles, tmp_path)
    norm, rope = (Patch.load(folder).manifest.id for folder in bundles[:2])
    assert found.best.patches == ids(bundles, NORM, ROPE)
    assert machine.names.count(BASELINE) == 3
    assert machine.names.count(CONTROL) == machine.names.count("reference") == 1
    for one in found.measured:
        name = " + ".join(one.patches)
        assert [each.receipt.patch_id for each in one.measured] == list(one.patches)
        assert [decision.verdict for decision in one.decisions] == ["accept"] * len(one.patches)
        for each in one.measured:
            # ten windows in each block; what came after the receipt was asked for is not in it
            assert each.receipt.calls == {f"kernel[{name}]": 30}
            assert each.quality_receipt.calls == {f"kernel[{name}]": 1}
            assert each.throughput.patch == name
            assert each.reverted_identical
            assert each.quality.positions == POSITIONS
            assert each.throughput.routing_entropy_pct == 97.0
            assert each.other_workloads is not None
            assert [point.batch for point in each.other_workloads.points] == [1, 16]
            found_at = [point.comparison for point in each.other_workloads.points]
            assert [(one.pairs, one.process_pairs) for one in found_at] == [(24, 3), (12, 3)]
    gains = [combination_of(one).comparison.gain_pct for one in found.measured]
    assert gains == [pytest.approx(gain, abs=0.15) for gain in (2.0, 1.2, 3.2)]
    assert not list(tmp_path.rglob("*.npy"))
    by_seed: dict[int, set[str]] = {}
    for seed, name in machine.rounds:
        assert name not in by_seed.setdefault(seed, set()), "no prompts come again"
        by_seed[seed].add(name)
    both = {norm, rope, f"{norm} + {rope}", BASELINE}
    assert all(names - {CONTROL} == both for names in by_seed.values())


def test_what_is_wrong_with_one_set_is_not_held_against_another(
    machine: Scripted, bundles: list[Path], tmp_path: Path
) -> None:
    norm, rope = (Patch.load(folder).manifest.id for folder in bundles[:2])
    machine.other_model = rope
    found = measure(bundles, tmp_path / "model")
    verdicts = {one.patches: combination_of(one).comparison.verdict for one in found.measured}
    assert verdicts == {(norm,): "accept", (rope,): "reject", (norm, rope): "reject"}
    machine.other_model, machine.slower_at_16 = "", norm
    found = measure(bundles, tmp_path / "slower")
    said = {one.patches: one.decisions[0].reasons[0] for one in found.measured}
    assert "slower at batch 16" in said[norm,]
    assert "slower at batch 16" in said[norm, rope]
    assert "slower" not in said[rope,]


def test_a_baseline_that_is_not_what_it_was_is_told(
    machine: Scripted, bundles: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = ScriptedArm.__init__

    def changed(self: ScriptedArm, *given: Any, **more: Any) -> None:
        begin(self, *given, **more)
        if machine.names.count(BASELINE) == 3:
            machine.stays_changed = BASELINE

    monkeypatch.setattr(ScriptedArm, "__init__", changed)
    found = measure(bundles, tmp_path)
    assert not any(each.reverted_identical for one in found.measured for each in one.measured)
    assert not found.best.patches


def test_a_killed_command_goes_on_after_the_last_whole_block(
    machine: Scripted, bundles: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.ends_at = 5 * 10 + 4 * (9 + 5) + 15
    with pytest.raises(KeyboardInterrupt):
        measure(bundles, tmp_path)
    assert not machine.open
    [wave] = tmp_path.rglob("wave-*.json")
    kept = wave.read_bytes()
    assert len(list(tmp_path.rglob("*.npy"))) == 5 + 1  # stock also one by one
    again = scripted(bundles)
    use(monkeypatch, again)
    found = measure(bundles, tmp_path)
    assert wave.read_bytes() == kept
    assert found.best.patches == ids(bundles, NORM, ROPE)
    assert again.names.count(BASELINE) == 2
    assert CONTROL not in again.names
    assert not {s for s, _ in again.rounds} & {s for s, _ in machine.rounds[:106]}
    assert found.measured[0].measured[0].throughput.comparison.process_pairs == 3
    third = scripted(bundles)
    use(monkeypatch, third)
    assert measure(bundles, tmp_path) == found
    assert not third.names
    # what is written last may be missing: all blocks are there
    for file in tmp_path.glob("*.json"):
        file.unlink()
    assert measure(bundles, tmp_path).best == found.best
    assert not third.names


def test_a_killed_comparison_goes_on_after_the_last_whole_pair(
    machine: Scripted, bundles: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = Patch.load(bundles[0])
    told: list[str] = []

    def compare(job: ABJob = JOB) -> tuple[Measurement, ...]:
        return compare_in_pairs(job, [norm], lambda _, said, *__: told.append(said), tmp_path)

    machine.gains[PATCHED] = 2.0
    machine.ends_at = 110
    with pytest.raises(KeyboardInterrupt):
        compare()
    [folder] = tmp_path.iterdir()
    assert any(str(folder) in said for said in told)
    kept = {file.name: file.read_bytes() for file in folder.glob("wave-*.json")}
    assert len(kept) >= 2  # the control, and a pair
    again = scripted(bundles)
    again.gains[PATCHED] = 2.0
    use(monkeypatch, again)
    with (folder / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(bench.UsageError, match="another process"):
            compare()
    assert not again.names
    # other pairs of the same patch begin anew
    again.ends_at = 1
    with pytest.raises(KeyboardInterrupt):
        compare(JOB.model_copy(update={"pairs_each": 10}))
    assert len(list(tmp_path.iterdir())) == 2
    assert {f.name: f.read_bytes() for f in folder.glob("wave-*.json")} == kept
    third = scripted(bundles)
    third.gains[PATCHED] = 2.0
    use(monkeypatch, third)
    [found] = compare()
    assert found.throughput.comparison.process_pairs == 3
    assert third.names.count(PATCHED) < 3
    assert CONTROL not in third.names
    assert not folder.exists()


def test_a_damaged_block_and_one_of_elsewhere_are_told(
    machine: Scripted, bundles: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.ends_at = 110
    with pytest.raises(KeyboardInterrupt):
        measure(bundles, tmp_path)
    [wave] = tmp_path.rglob("wave-0.json")
    whole = wave.read_text()
    wave.write_text(whole[:100])
    with pytest.raises(bench.VerificationError, match=r"wave-0\.json is damaged"):
        measure(bundles, tmp_path)
    wave.write_text(whole)
    began = wave.with_name("begun.json")
    began.write_text(began.read_text().replace('"fingerprint":"', '"fingerprint":"0'))
    with pytest.raises(bench.UsageError, match="from another machine"):
        measure(bundles, tmp_path)


def test_where_only_two_fit_each_set_is_measured_by_itself(
    machine: Scripted, bundles: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, small := scripted(bundles, total=25))
    taken = measure(bundles, tmp_path / "waves", compare_shared=given(machine))
    asked: list[tuple[str, ...]] = []

    def one_by_one(job: ABJob, folders: Sequence[Path], report: Any) -> tuple[Measurement, ...]:
        asked.append(tuple(folder.name for folder in folders))
        chosen = tuple(Patch.load(folder).manifest.id for folder in folders)
        return next(one.measured for one in taken.measured if one.patches == chosen)

    found = measure(bundles, tmp_path / "alone", compare_one=one_by_one)
    assert asked == [(NORM,), (ROPE,), (NORM, ROPE)]
    assert small.names == [BASELINE]
    assert not small.open
    assert found.best == taken.best


def given(machine: Scripted) -> Any:
    """Blocks on another machine, where there is room."""

    def shared(*asked: Any) -> Any:
        small, ScriptedArm.machine = ScriptedArm.machine, machine
        try:
            return compare_sets(*asked)
        finally:
            ScriptedArm.machine = small

    return shared


def test_too_few_blocks_are_refused(bundles: list[Path], tmp_path: Path) -> None:
    few = JOB.model_copy(update={"process_pairs": 2})
    with pytest.raises(bench.UsageError, match="2 process pairs"):
        find_best_set(few, bundles[:2], tmp_path, silent, alone)


@pytest.mark.slow
def test_a_block_of_real_processes(
    bundles: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt-oss-tiny in transformers on the CPU, two patches, in one block if the memory allows."""
    monkeypatch.setattr(session, "STAGGER_S", 0.0)
    sets = {}
    for name in (ROPE, ROUTE):
        op = bench.load_op(name)
        [candidate] = [one for info, one in op.solutions() if info.language == Language.TORCH]
        right = evaluation(candidate).model_copy(update={"op": name})
        folder = tmp_path / name
        made = Patch.create(folder, op, candidate, right, engine="transformers", made_by="test")
        sets[name] = [made]
    tiny = WORKLOAD.model_copy(update={"input_len": 8, "threads": 1})
    job = ABJob(workload=tiny, process_pairs=1, pairs_each=2, quality_steps=4)
    own, clocks = PatchSession(job, sets, tmp_path / "waves"), ClockMonitor("cpu")
    own.open(silent)
    plan = ABPlan(process_pairs=1, pairs=2, shared=True, stagger_s=0.0)
    assert own.take(plan, clocks, silent)
    first = own.taken[0]
    assert first.greedy["before"] == first.greedy["again"]
    baseline = own.folder.served(BASELINE).logits
    assert torch.equal(baseline, own.folder.served(CONTROL).logits)
    ran = []
    for name, [patch] in sets.items():
        [one] = [each for each in own.taken if name in each.block.swapped]
        timed, compared = one.receipts[name], one.quality_receipts[name]
        assert timed.keys() == compared.keys() == {patch.manifest.id}
        [called, again] = (each[patch.manifest.id].calls for each in (timed, compared))
        assert called.keys() <= again.keys()
        windows = [w for w in one.block.windows[name] if w.arm == "patched"]
        assert len(windows) == 4
        assert sum(called.values()) == 4 * (windows[0].kernel_calls or 0) > 0
        assert {w.kernel_calls for w in one.block.windows[name]} == {0, windows[0].kernel_calls}
        assert torch.allclose(baseline, own.folder.served(name).logits, atol=1e-4)
        ran.append(called.keys())
    rope, route = ran
    assert not rope & route


def test_vllm_is_told_how_large_its_cache_is() -> None:
    served = bench.Workload(
        model="gpt-oss-20b",
        engine="vllm",
        device="cuda",
        dtype="bfloat16",
        batch=8,
        input_len=1024,
        output_len=64,
    )
    own = cache_bytes(served)
    # 24 layers, keys and values, 8 heads of 64, two bytes: 48 KiB a token
    assert own == 5 * 8 * (1024 + 256) * 48 * 1024 // 4 or own == 1 << 30
    wide = cache_bytes(served, [Shape(batch=64, context=1024)])
    assert wide == 5 * 64 * (1024 + 256) * 48 * 1024 // 4
    job = with_cache_size(ABJob(workload=served, process_pairs=3))
    assert job.arguments == {"kv_cache_memory_bytes": own}
    said = ABJob(workload=served, process_pairs=3, arguments={"kv_cache_memory_bytes": 1})
    assert with_cache_size(said) == said
    assert with_cache_size(JOB) == JOB
    unknown = ABJob(workload=served.model_copy(update={"model": "other/model"}), process_pairs=3)
    assert with_cache_size(unknown) == unknown
