"""Where the time of a measurement goes."""

from __future__ import annotations

from patcher.ab.timeline import Timeline


def test_time_is_the_stages_until_the_next_word() -> None:
    now, told = [100.0], []
    timeline = Timeline(lambda *said: told.append(said), lambda: now[0])
    now[0] += 3.0
    for stage, seconds in (
        ("tune the baseline (stock)", 30.0),
        ("pairs in processes (process pair 1: loading the patched)", 50.0),
        ("pairs in processes, +1.2 % so far", 4.0),
        ("pairs in processes (asking baseline and patched)", 6.0),
        ("elsewhere: batch 64", 8.0),
        ("pairs in processes (process pair 2: loading the baseline)", 10.0),
        ("pairs in processes, +1.3 % so far", 5.0),
        ("quality", 20.0),
    ):
        timeline(stage, 1, 2)
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
    assert told[0] == ("tune the baseline (stock)", 1, 2)
    assert len(told) == 8
