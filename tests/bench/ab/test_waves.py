"""Blocks with a shared baseline, with doubles for processes of known speed, bias and memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from machine_doubles import (
    GAINS,
    Machine,
    Named,
)
from measure_sample import WORKLOAD
from process_doubles import GIB, ScriptedSide

from patcher import bench
from patcher.bench import Throughput
from patcher.bench.ab.block_session import BlockSession
from patcher.bench.ab.blocks import BASELINE, CONTROL, Block, throughput_of
from patcher.bench.ab.processes import SHARE_BESIDE, ABPlan, ProcessMemory
from patcher.bench.machine.clocks import ClockMonitor
from patcher.bench.stats.compare import holm

ROUNDS = 10
"""Nine pairs and the warm-up pair."""


class Session(BlockSession[Named]):
    """Takes its blocks as `patcher.ab.session.PatchSession.take` does."""

    def run(self, seen: list[tuple[str, ...]] | None = None, keep: Any = None) -> bool:
        """`seen` gets what happens beside the windows, `keep` each whole block."""
        seen = [] if seen is None else seen
        with self:
            for block in self.blocks_left():
                if block.number == 0:
                    assert self.pool.baseline is not None
                    seen.append(("begin", self.pool.baseline.name))
                for processes in block.loaded():
                    block.take(processes)
                    for name, process in processes.items():
                        block.read_peak(name, process)
                        seen.append((str(block.number), name))
                        block.time_steps(name, process)
                    seen.append(("also", *sorted(processes.keys() - {CONTROL})))
                found = block.close()
                if keep is not None:
                    keep(found)
            return self.complete


def session(machine: Machine, *names: str, **given: Any) -> Session:
    plan = ABPlan(process_pairs=3, pairs=ROUNDS - 1, shared=True)
    ScriptedSide.seeds = []
    made: dict[str, Any] = {"plan": plan, "clocks": ClockMonitor("cpu")} | given
    return Session(machine, names or tuple(GAINS), WORKLOAD, **made)


def told(name: str, own: Session) -> Throughput:
    residency = own.residency(name)
    return throughput_of(name, own.taken, WORKLOAD, 0.5, ClockMonitor("cpu"), residency)


def test_the_gain_of_each_is_found_against_one_baseline() -> None:
    machine = Machine()
    own = session(machine)
    assert own.run()
    assert not machine.open
    found = {name: told(name, own) for name in GAINS}
    for name, gain in GAINS.items():
        one = found[name].comparison
        assert one.gain_low_pct < gain < one.gain_high_pct, name
        assert one.verdict == ("accept" if gain else "reject")
        assert (one.process_pairs, one.pairs, one.dropped_pairs) == (3, 27, 3)
        assert found[name].patch == name
        control = found[name].control
        assert control is not None
        assert (control.pairs, control.dropped_pairs) == (9, 1)
        assert abs(control.gain_pct) < 0.3
        assert found[name].latency["patched"].steps == 30
        assert found[name].peak_memory_bytes == {"baseline": 10 * GIB, "patched": 10 * GIB + 1}
        assert Throughput.model_validate_json(found[name].model_dump_json()) == found[name]
    assert [one.verdict for one in holm([one.comparison for one in found.values()])] == [
        *("accept", "accept", "accept", "reject")
    ]
    # sixteen starts, where four A/Bs of their own take twenty-eight
    assert len(machine.names) == 2 + 3 * 1 + 3 * 4 - 1
    assert "6 processes loaded at once" in found["a"].residency


def test_all_processes_of_a_block_are_fresh_and_each_set_takes_turns_in_starting_first() -> None:
    machine = Machine()
    own = session(machine)
    own.run()
    assert machine.names == [
        *(BASELINE, CONTROL, *GAINS),
        *(*GAINS, BASELINE),
        *(BASELINE, *GAINS),
    ]
    assert machine.most == 6
    assert machine.shares[0] == SHARE_BESIDE
    assert machine.shares[1:6] == [pytest.approx(2 * SHARE_BESIDE / 6)] * 5
    for name in GAINS:
        windows = told(name, own).windows
        swaps = {(w.process, w.kind): w.swapped for w in windows}
        assert swaps == {(0, "aa"): False, (0, "ab"): False, (1, "ab"): True, (2, "ab"): False}
        orders = [w.arm for w in windows if w.kind == "ab"][::2]
        assert orders.count("baseline") == orders.count("patched") == 15


def test_prompts_are_shared_within_a_round_and_never_between_rounds() -> None:
    machine = Machine()
    own = session(machine)
    own.run()
    rounds: dict[int, list[str]] = {}
    for seed, name in machine.rounds:
        rounds.setdefault(seed, []).append(name)
    assert len(rounds) == 3 * ROUNDS
    each = [sorted(names) for names in rounds.values()]
    assert each[:ROUNDS] == [sorted((BASELINE, CONTROL, *GAINS))] * ROUNDS
    assert each[ROUNDS:] == [sorted((BASELINE, *GAINS))] * (2 * ROUNDS)
    for first, mirror in zip(*[iter(rounds.values())] * 2, strict=True):
        assert mirror == first[::-1]
    assert len({tuple(names) for names in rounds.values()}) > 8
    # out and back again: two turns a window
    assert machine.turns[:12] == [*machine.turns[:6], *machine.turns[:6][::-1]]
    pairs = [(w.pair, w.arm) for w in told("a", own).windows]
    assert len(set(pairs)) == len(pairs), "no number is a control's and a variant's"


@pytest.mark.parametrize("total", [35, 45, 55])
def test_as_many_at_once_as_fit(total: int) -> None:
    machine = Machine(total=total)
    own = session(machine)
    assert own.run()
    assert own.pool.room is not None
    assert own.pool.room.processes == machine.most == total // 10
    for name in GAINS:
        found = told(name, own)
        assert found.comparison.process_pairs == 3
        assert found.comparison.gain_pct == pytest.approx(GAINS[name], abs=0.3)
        swaps = [block.swapped[name] for block in own.taken if name in block.swapped]
        assert swaps == [False, True, False]
    places = machine.most - 1
    assert len(own.taken) == -(-(3 * len(GAINS) + 1) // places)


def test_where_two_fit_nothing_is_shared() -> None:
    for machine in (Machine(total=25), Machine(total=15)):
        own = session(machine)
        assert not own.run()
        assert machine.names == [BASELINE]
        assert not machine.open
        assert not own.taken

    class Small(Machine):
        error: bench.PatcherError = bench.PatcherError("out of memory")

        def start(self, name: str, share: float) -> Named:
            raise self.error

    assert not session(Small()).run()
    missing = Small()
    missing.error = bench.MissingError("vllm is not installed")
    with pytest.raises(bench.MissingError):
        session(missing).run()


def test_no_process_outlives_a_failure_and_whole_blocks_are_kept() -> None:
    machine, kept = Machine(), list[Block]()
    machine.dies_after = 6 * ROUNDS + 20
    with pytest.raises(bench.PatcherError, match="SIGKILL"):
        session(machine).run(keep=kept.append)
    assert not machine.open
    assert [block.number for block in kept] == [0]

    class Half(Machine):
        def start(self, name: str, share: float) -> Named:
            if name == "b":
                raise bench.PatcherError("the b process ended")
            return super().start(name, share)

    for stagger in (None, 0.0):
        broken = Half()
        plan = ABPlan(process_pairs=3, pairs=9, shared=True, stagger_s=stagger)
        with pytest.raises(bench.PatcherError, match="the b process"):
            session(broken, plan=plan).run()
        assert broken.names
        assert not broken.open


def test_a_killed_session_goes_on_after_the_last_whole_block() -> None:
    machine, kept = Machine(), list[Block]()
    machine.ends_at = 6 * ROUNDS + 20
    with pytest.raises(KeyboardInterrupt):
        session(machine).run(keep=kept.append)
    assert not machine.open
    seen: list[tuple[str, ...]] = []
    again = Machine()
    own = session(again, taken=list(kept))
    assert own.run(seen, keep=kept.append)
    # the first baseline shows the room, so that nothing starts before it
    assert again.names == [*(BASELINE, *GAINS), *(*GAINS, BASELINE)]
    assert ("begin", BASELINE) not in seen, "patched processes have run before"
    assert [block.number for block in kept] == [0, 1, 2]
    seeds = {seed for seed, _ in again.rounds}
    assert not seeds & {seed for seed, _ in machine.rounds[: 6 * ROUNDS]}
    found = told("a", own)
    assert found.comparison.process_pairs == 3
    assert found.comparison.verdict == "accept"
    assert session(again, taken=kept).complete


def test_each_is_asked_after_the_rounds_and_the_first_baseline_before_any_patch() -> None:
    seen: list[tuple[str, ...]] = []

    class Watched(Machine):
        def start(self, name: str, share: float) -> Named:
            if len(self.names) == 1:
                assert seen == [("begin", BASELINE)], "before any patch"
            return super().start(name, share)

    session(Watched(), "a").run(seen)
    assert seen == [
        *(
            ("begin", BASELINE),
            ("0", BASELINE),
            ("0", CONTROL),
            ("0", "a"),
            ("also", "a", BASELINE),
        ),
        *(("1", "a"), ("1", BASELINE), ("also", "a", BASELINE)),
        *(("2", BASELINE), ("2", "a"), ("also", "a", BASELINE)),
    ]


def test_processes_of_a_block_load_side_by_side() -> None:
    class Slow(Machine):
        loading = most_loading = 0

        def start(self, name: str, share: float) -> Named:
            self.loading += 1
            self.most_loading = max(self.most_loading, self.loading)
            never.wait(0.05)
            self.loading -= 1
            return super().start(name, share)

    never = threading.Event()
    one_by_one, beside = Slow(), Slow()
    session(one_by_one).run()
    own = session(beside, plan=ABPlan(process_pairs=3, pairs=9, shared=True, stagger_s=0.0))
    own.run()
    assert one_by_one.most_loading == 1
    assert beside.most_loading >= 4
    assert sorted(beside.names) == sorted(one_by_one.names)
    assert not beside.open


def test_room_is_what_the_first_takes_and_a_little_more() -> None:
    assert ProcessMemory(held=10, peak=0, free=10).room == 1
    assert ProcessMemory(held=100, peak=0, free=102).room == 2
    assert ProcessMemory(held=18, peak=0, free=121).room == 7
