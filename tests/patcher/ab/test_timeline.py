"""Where the time of a measurement goes."""

from __future__ import annotations

from patcher.ab.timeline import Timeline
from patcher.bench.ab.phases import ABPhase


def test_time_is_the_stages_until_the_next_word() -> None:
    now, told = [100.0], []
    timeline = Timeline(lambda *said: told.append(said), lambda: now[0])
    now[0] += 3.0
    for phase, stage, seconds in (
        (ABPhase.TUNE, "tune the baseline (load_format=dummy)", 30.0),
        (ABPhase.LOAD, "pairs in processes (block 1: loading patched)", 50.0),
        (ABPhase.PAIRS, "pairs in processes, +1.2 % so far", 4.0),
        (ABPhase.ASK, "pairs in processes (block 1: asking baseline)", 6.0),
        (ABPhase.OTHER, "other traffic: batch 64", 8.0),
        (ABPhase.LOAD, "pairs in processes (block 2: loading baseline)", 10.0),
        (ABPhase.PAIRS, "pairs in processes, +1.3 % so far", 5.0),
        (ABPhase.QUALITY, "quality", 20.0),
    ):
        timeline(phase, stage, 1, 2)
        now[0] += seconds
    assert timeline.took_s() == {
        "loading engines": 60.0,
        "looking for the best stock configuration": 30.0,
        "quality": 20.0,
        "pairs": 9.0,
        "other traffic": 8.0,
        "tokens, logits, memory": 6.0,
        "getting ready": 3.0,
    }
    assert sum(timeline.took_s().values()) == now[0] - 100.0
    assert told[0] == ("tune the baseline (load_format=dummy)", 1, 2)
    assert len(told) == 8
