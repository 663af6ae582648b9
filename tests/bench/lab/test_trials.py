"""Many verdicts from few starts, with doubles for processes whose speed and bias are known."""

from __future__ import annotations

import json
import lzma
import random
from pathlib import Path
from typing import Any

import pytest
from measure_sample import WORKLOAD
from process_doubles import Host, ScriptedProcess, ScriptedSide

from patcher import bench
from patcher.bench import Shape
from patcher.bench.lab.trials.driver import Driver
from patcher.bench.lab.trials.folder import Folder, TrialsRequest, markdown
from patcher.bench.lab.trials.trial import (
    Repeats,
    Resident,
    Setting,
    VerdictTrial,
    draw,
    summarise,
    verdict_on,
)
from patcher.bench.lab.trials.verdict_trials import as_it_should, main

ASKED = TrialsRequest(
    workload=WORKLOAD,
    arguments={},
    patch=None,
    processes=6,
    trials=20,
    pairs=3,
    planted=4,
    planted_pairs=5,
    gain_pct=1.0,
    repeats=7,
    repeat_steps=32,
    margin_pct=0.5,
    seed=0,
)


class Machine(Host):
    """Its clock goes on by what its windows take."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**{"bias_pct": 0.08, **given})
        self.now = 0.0
        self.windows = 0
        self.breaks_at: int | None = None

    def begin(self, number: int, patched: bool, seconds: float) -> Resident:
        self.now += 0.5
        made = self.start("patched" if patched else "baseline", 0.15)
        made.__class__ = SlowableProcess
        assert isinstance(made, SlowableProcess)
        made.delayed_s = 0.0
        return made


class SlowableProcess(ScriptedProcess):
    delayed_s: float

    def delay(self, seconds: float) -> None:
        self.delayed_s = seconds

    def side(self, shape: Shape | None = None) -> SlowableSide:
        return SlowableSide(self)


class SlowableSide(ScriptedSide):
    process: SlowableProcess

    def prefill(self, seed: int) -> None:
        super().prefill(seed)
        machine: Any = self.process.host
        machine.windows += 1
        if machine.windows == machine.breaks_at:
            raise bench.PatcherError("process 3 ended (killed by SIGKILL)")

    def turn(self, steps: int) -> None:
        super().turn(steps)
        self.decode_s += (steps - 1) * self.process.delayed_s
        machine: Any = self.process.host
        machine.now += 0.01 * steps


def drive(machine: Machine, folder: Folder, seconds: float = 1000.0) -> Driver:
    ScriptedSide.seeds = []
    driver = Driver(folder, seconds, machine.begin, clock=lambda: machine.now)
    driver.run()
    assert not machine.open
    return driver


def test_no_trial_of_a_against_a_is_accepted_and_what_is_planted_is_found(tmp_path: Path) -> None:
    folder = Folder(tmp_path, ASKED)
    drive(Machine(gain_pct=0.0), folder)
    assert not any(folder.left().values())
    found = folder.summary()
    aa, planted = found.kinds["aa"], found.kinds["planted"]
    assert (aa.trials, aa.verdicts["accept"], aa.unusable) == (20, 0, 0)
    assert aa.covered >= 16
    assert found.false_accept_limit_pct == pytest.approx(13.9, abs=0.1)
    assert (planted.trials, planted.verdicts["accept"]) == (4, 4)
    assert planted.planted_pct == pytest.approx(1.0, abs=0.2)
    assert planted.gain_mean_pct == pytest.approx(1.0, abs=0.2)
    assert aa.process_pair_sd_pct == pytest.approx(0.11, abs=0.06)
    assert found.cv_within_pct is not None
    assert found.cv_within_pct < 0.1
    assert found.repeats == 7
    assert as_it_should(found)
    text = (tmp_path / "summary.md").read_text()
    for said in (
        *("| A/A | 20 | 0 |", "planted +1.0", "No A/A trial of 20 was accepted: at most 13.9 %"),
        *("CV of 7 repeats", "3 process pairs of 6 loaded processes", "(1 start of all)"),
    ):
        assert said in text, said


def test_intervals_hold_the_truth_about_as_often_as_they_say(tmp_path: Path) -> None:
    """In one session trials share their six processes, so that a bad draw is in many of them."""
    covered = 0
    for seed in range(8):
        folder = Folder(tmp_path / str(seed), ASKED.model_copy(update={"seed": seed}))
        drive(Machine(gain_pct=0.0), folder)
        covered += folder.summary().kinds["aa"].covered
    assert covered >= 0.92 * 8 * ASKED.trials


def test_trials_share_no_window_and_a_process_is_in_one_pair_of_each(tmp_path: Path) -> None:
    folder = Folder(tmp_path, ASKED)
    drive(Machine(gain_pct=0.0), folder)
    seeds: dict[int, int] = {}
    for seed, _ in ScriptedSide.seeds:
        seeds[seed] = seeds.get(seed, 0) + 1
    repeated = seeds.pop(min(seeds))  # the one window of the repeats
    assert repeated == 6 * 8
    assert set(seeds.values()) == {2}
    assert len(seeds) == 20 * 3 * 4 + 4 * 3 * 6
    for trial in folder.trials:
        assert len({number for pair in trial.process_pairs for number in pair}) == 6
        assert trial.comparison is not None
        pairs = 9 if trial.kind == "aa" else 15
        assert (trial.comparison.pairs, trial.comparison.process_pairs) == (pairs, 3)
    firsts = [trial.process_pairs[0][0] for trial in folder.trials]
    assert len(set(firsts)) >= 5
    kinds = [trial.kind for trial in folder.trials]
    assert kinds[:6].count("planted") == 1, "in between, not at the end"


def test_time_is_kept_and_a_second_call_goes_on(tmp_path: Path) -> None:
    machine = Machine(gain_pct=0.0)
    calls = 0
    while any(Folder(tmp_path, ASKED).left().values()):
        folder = Folder(tmp_path, ASKED)
        begun, machine.now = machine.now, machine.now
        drive(machine, folder, 60.0)
        assert machine.now - begun <= 60.0
        calls += 1
        assert calls < 20
    assert calls > 2
    found = Folder(tmp_path, ASKED).summary()
    assert found.starts == calls
    assert [trial.number for trial in folder.trials] == list(range(24))
    assert {one.process for one in folder.repeats} == set(range(6))
    started = len(machine.started)
    drive(machine, folder)  # nothing is left: nothing is started
    assert len(machine.started) == started


def test_a_process_that_dies_ends_all_and_what_was_taken_is_kept(tmp_path: Path) -> None:
    machine = Machine(gain_pct=0.0)
    machine.breaks_at = 6 * 8 + 24 * 2 + 36 + 5  # two of A/A, one planted
    with pytest.raises(bench.PatcherError, match="SIGKILL"):
        drive(machine, Folder(tmp_path, ASKED))
    assert not machine.open
    again = Folder(tmp_path, ASKED)
    assert len(again.trials) == 3
    with (tmp_path / "trials.jsonl").open("a") as file:
        file.write('{"number": 3, "ki')  # killed while it wrote
    assert len(Folder(tmp_path, ASKED).trials) == 3
    drive(Machine(gain_pct=0.0), Folder(tmp_path, ASKED))
    assert [trial.number for trial in Folder(tmp_path, ASKED).trials] == list(range(24))


def test_half_of_the_processes_have_a_patch_in(tmp_path: Path) -> None:
    asked = ASKED.model_copy(update={"patch": "0" * 64, "trials": 6})
    folder = Folder(tmp_path, asked)
    machine = Machine(gain_pct=3.0)
    drive(machine, folder)
    assert sorted(arm for arm, _ in machine.started) == ["baseline"] * 3 + ["patched"] * 3
    found = folder.summary()
    assert found.kinds["patch"].verdicts == {"accept": 6, "inconclusive": 0, "reject": 0}
    assert "| patch | 6 | 6 |" in markdown(found, folder)
    for trial in folder.trials:
        assert all(first < 3 <= second for first, second in trial.process_pairs)


def test_more_processes_make_more_pairs_of_them(tmp_path: Path) -> None:
    asked = ASKED.model_copy(update={"processes": 8, "trials": 2, "planted": 0, "repeats": 0})
    folder = Folder(tmp_path, asked)
    drive(Machine(gain_pct=0.0), folder)
    for trial in folder.trials:
        assert sorted(number for pair in trial.process_pairs for number in pair) == [*range(8)]
        assert trial.comparison is not None
        assert (trial.comparison.pairs, trial.comparison.process_pairs) == (12, 4)


def test_what_is_accepted_and_not_there_is_told(tmp_path: Path) -> None:
    folder = Folder(tmp_path, ASKED.model_copy(update={"planted": 0, "repeats": 0, "trials": 3}))
    drive(Machine(gain_pct=0.0), folder)
    assert as_it_should(summarise(folder.trials, []))
    wrong = [
        trial.model_copy(
            update={"comparison": trial.comparison.model_copy(update={"verdict": "accept"})}
        )
        for trial in folder.trials
        if trial.comparison is not None
    ]
    found = summarise(wrong, [])
    assert not as_it_should(found)
    void = [trial.model_copy(update={"comparison": None}) for trial in folder.trials]
    assert not as_it_should(summarise(void, [])), "no verdict of A against A at all"
    assert found.false_accept_limit_pct is None


def test_pairs_are_drawn_from_all() -> None:
    rng = random.Random(1)
    seen = {draw(rng, 6) for _ in range(2000)}
    assert len({frozenset(map(frozenset, drawn)) for drawn in seen}) == 15
    assert len({draw(rng, 8)[0] for _ in range(500)}) == 8 * 7


def test_a_folder_of_other_options_is_refused(tmp_path: Path) -> None:
    Folder(tmp_path, ASKED)
    with pytest.raises(bench.UsageError, match="other options"):
        Folder(tmp_path, ASKED.model_copy(update={"pairs": 4}))


def test_what_it_takes_is_told_beforehand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "new"), "--plan"]) == 0
    told = capsys.readouterr().out
    assert "start of 6 processes: 210 s" in told
    assert "aa: 20 left" in told
    seconds = float(told.rsplit("in all ", 1)[1].split(" s")[0])
    assert 300 < seconds < 600
    assert main([str(tmp_path / "new"), "--seconds", "20"]) == 4
    assert "budget: a trial takes about" in capsys.readouterr().err
    assert main([str(tmp_path / "new"), "--trials", "30"]) == 2


@pytest.mark.parametrize("name", ["asked.json", "trials.jsonl"])
def test_what_is_no_record_is_told(name: str, tmp_path: Path) -> None:
    Folder(tmp_path, ASKED)
    (tmp_path / name).write_text("{}\n")
    with pytest.raises(bench.UsageError, match=f"{name} holds what is no record"):
        Folder(tmp_path, ASKED)


@pytest.mark.parametrize("name", ["h200-capped", "h200-order"])
def test_the_verdicts_of_the_evidence_are_those_of_its_windows(name: str) -> None:
    folder = Path(__file__).parents[3] / "bench" / "results" / "verdict-trials"
    shown = json.loads(bench.content(folder / f"{name}.json.xz"))
    with lzma.open(folder / f"{name}.trials.jsonl.xz", "rt") as file:
        taken = [VerdictTrial.model_validate_json(line) for line in file]
    kept = folder / f"{name}.repeats.jsonl"
    repeats = [
        Repeats.model_validate_json(line)
        for line in (kept.read_text().splitlines() if kept.exists() else ())
    ]
    setting = Setting(WORKLOAD, pairs=3, margin_pct=0.5, seed=0)
    decided = [
        trial.model_copy(update={"comparison": verdict_on(setting, trial.windows)})
        for trial in taken
    ]
    assert len(decided) == len(shown["trials"])
    for trial, row in zip(decided, shown["trials"], strict=True):
        assert trial.comparison is not None
        assert (trial.kind, trial.comparison.verdict) == (row["kind"], row["verdict"])
        assert trial.comparison.gain_pct == pytest.approx(row["gain_pct"], abs=1e-3)
        assert trial.comparison.gain_low_pct == pytest.approx(row["low_pct"], abs=1e-3)
    assert json.loads(summarise(decided, repeats).model_dump_json()) == shown["summary"]


def test_what_pairs_differ_by_in_their_turns() -> None:
    """A turn of one side takes 2 ms more in every second pair, another turn in other pairs."""
    windows = []
    for number in range(401):
        late = (number % 2, number // 2 % 2)
        turns = {"baseline": (0.01, 0.01), "patched": tuple(0.009 + 0.002 * one for one in late)}
        for arm, own in turns.items():
            windows.append(
                {"pair": number, "arm": arm, "tokens": 64, "decode_s": sum(own), "turns_s": own}
                | {"kind": "ab", "prefill_s": 0.1, "process": 0, "swapped": False}
            )
    trial = VerdictTrial.model_validate(
        {"number": 0, "kind": "aa", "process_pairs": [[0, 1]], "start": 0, "batch": 8}
        | {"comparison": None, "windows": windows, "seconds": 1.0}
    )
    found = summarise([trial], []).kinds["aa"]
    assert found.turn_sd_ms == pytest.approx(1.0, rel=0.01)
    assert found.pair_sd_by_turns_pct == pytest.approx(100 * 2**0.5 / 20, rel=0.02)
