"""Process pairs, with doubles for processes whose speed, bias and memory are known."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from measure_sample import WORKLOAD
from process_doubles import (
    GIB,
    Host,
    ScriptedProcess,
    ScriptedSide,
)
from pydantic import JsonValue
from rich.console import Console

from patcher import bench
from patcher.ab import launcher as starts
from patcher.ab.job import ABJob
from patcher.ab.launcher import ArmLauncher
from patcher.ab.options import ThroughputOptions, argument, job_of, read_tuning, united
from patcher.ab.quality_check import QualityCheck, Served
from patcher.ab.session import compare_in_pairs
from patcher.bench import Throughput
from patcher.bench.ab.block_session import BlockSession, OpenBlock
from patcher.bench.ab.blocks import BASELINE, CONTROL, throughput_of
from patcher.bench.ab.engine_config import Tuning
from patcher.bench.ab.phases import ABPhase, silent
from patcher.bench.ab.processes import (
    SHARE_ALONE,
    SHARE_BESIDE,
    ABPlan,
    TooLateError,
)
from patcher.bench.ab.throughput import of_processes
from patcher.bench.ab.traffic import traffic, traffics
from patcher.bench.ab.tuning import chosen_options, options_of, tune
from patcher.bench.ab.windows import turn_lengths
from patcher.bench.machine.clocks import ClockMonitor
from patcher.cli import app
from patcher.integrate import engine_wants
from patcher.show.throughput import throughput_lines

Visit = Callable[[OpenBlock[Any], str, Any], None]


def run(
    host: Host, plan: ABPlan | None = None, visit: Visit = lambda *_: None, **options: Any
) -> Throughput:
    """As `patcher.ab.session.PatchSession.take` does; `visit` is what it asks each process."""
    ScriptedSide.seeds = []
    plan, clocks = plan or ABPlan(process_pairs=3, pairs=9), ClockMonitor("cpu")
    with BlockSession(host, ("patched",), WORKLOAD, plan, clocks, **options) as session:
        for block in session.blocks_left():
            for processes in block.loaded():
                block.take(processes)
                for name, process in processes.items():
                    session.tell_block(ABPhase.ASK, f"asking {name}")
                    block.read_peak(name, process)
                    visit(block, name, process)
                    block.time_steps(name, process)
            block.close()
        residency = session.residency("patched")
        return throughput_of("patched", session.taken, WORKLOAD, 0.5, clocks, residency)


def test_a_gain_is_found_and_bias_between_processes_is_in_the_interval() -> None:
    said: list[tuple[ABPhase, str, int, int]] = []
    host = Host(bias_pct=0.05)
    found = run(host, progress=lambda *told: said.append(told))
    assert found.comparison.verdict == "accept"
    assert found.comparison.process_pairs == 3
    assert found.comparison.block_pairs == 0
    assert found.comparison.gain_low_pct < 3.0 < found.comparison.gain_high_pct
    wide = run(Host(gain_pct=0.4, bias_pct=0.3))
    assert wide.comparison.verdict != "accept"
    assert not host.open
    assert host.most == 2
    assert said[-1][2] == said[-1][3]
    assert {stage.partition(" (")[0] for _, stage, _, _ in said} == {"pairs in processes"}
    taken = [stage for _, stage, _, _ in said if "asking" not in stage]
    assert taken[-1].endswith("])")


def test_processes_are_fresh_swapped_and_warm() -> None:
    host = Host()
    found = run(host)
    # the control's two, of which one goes on; then a fresh one for each arm, swapped
    assert [arm for arm, _ in host.started] == [
        *("baseline", "baseline", "patched"),
        *("patched", "baseline", "baseline", "patched"),
    ]
    assert {share for _, share in host.started} == {SHARE_BESIDE}
    swaps = {(window.process, window.kind): window.swapped for window in found.windows}
    assert swaps == {(0, "aa"): False, (1, "ab"): False, (2, "ab"): True, (3, "ab"): False}
    # nine pairs and the warm-up pair, in each of three
    assert (found.comparison.pairs, found.comparison.dropped_pairs) == (27, 3)
    assert found.control is not None
    assert found.control.dropped_pairs == 1
    assert abs(found.control.gain_pct) < 1
    for arm in ("baseline", "patched"):
        orders = [w.arm for w in found.windows if w.kind == "ab"][::2]
        assert orders.count(arm) == 15, "as often first as second"


def test_both_windows_of_a_pair_run_the_same_prompts_and_no_two_pairs_do() -> None:
    run(Host())
    by_seed: dict[int, list[str]] = {}
    for seed, arm in ScriptedSide.seeds:
        by_seed.setdefault(seed, []).append(arm)
    assert {tuple(sorted(arms)) for arms in by_seed.values()} == {
        ("baseline", "baseline"),
        ("baseline", "patched"),
    }


@pytest.mark.parametrize("host", [Host(total=15), Host(bias_pct=0.02, total=15)])
def test_where_two_do_not_fit_one_is_loaded_at_a_time(host: Host) -> None:
    found = run(host)
    assert host.most == 1
    assert found.residency.startswith("one arm loaded at a time: one takes 10.0 GiB, 5.0 GiB")
    assert {share for _, share in host.started[1:]} == {SHARE_ALONE}
    assert [arm for arm, _ in host.started[1:]] == [
        *("baseline", "baseline"),
        *("baseline", "patched", "patched", "baseline", "baseline", "patched"),
    ]
    assert found.comparison.pairs == 27
    assert found.comparison.gain_pct == pytest.approx(3.0, abs=0.3)


@pytest.mark.parametrize("together", [None, False])
def test_no_process_starts_in_silence(together: bool | None) -> None:
    said: list[str] = []
    before: list[str] = []

    class Noting(Host):
        def start(self, name: str, share: float) -> ScriptedProcess:
            before.append(said[-1] if said else "")
            return super().start(name, share)

    plan = ABPlan(process_pairs=3, pairs=9, together=together)
    run(Noting(), plan, progress=lambda phase, stage, done, total: said.append(stage))
    assert len(before) > 6
    assert all("loading" in stage for stage in before)


def test_two_may_load_side_by_side() -> None:
    class Slow(Host):
        """Where the second of two has begun before the first is loaded."""

        loading = most_loading = 0

        def start(self, name: str, share: float) -> ScriptedProcess:
            self.loading += 1
            self.most_loading = max(self.most_loading, self.loading)
            other.wait(0.05)
            made = super().start(name, share)
            self.loading -= 1
            return made

    other = threading.Event()  # never set: a wait
    one_by_one, beside = Slow(), Slow()
    run(one_by_one)
    found = run(beside, ABPlan(process_pairs=3, pairs=9, stagger_s=0.0))
    assert (one_by_one.most_loading, beside.most_loading) == (1, 2)
    assert sorted(beside.started) == sorted(one_by_one.started)
    assert found.comparison.pairs == 27
    assert not beside.open


def test_half_of_the_memory_may_be_too_little_to_start() -> None:
    class Small(Host):
        def start(self, name: str, share: float) -> ScriptedProcess:
            if share < 0.5:
                raise bench.PatcherError("out of memory")
            return super().start(name, share)

    found = run(Small())
    assert "half of the memory it does not start: out of memory" in found.residency

    class Missing(Host):
        def start(self, name: str, share: float) -> ScriptedProcess:
            raise bench.MissingError("vllm is not installed")

    with pytest.raises(bench.MissingError):
        run(Missing())


def test_what_was_asked_is_not_looked_for() -> None:
    host = Host()
    found = run(host, ABPlan(process_pairs=3, pairs=9, together=False))
    assert host.most == 1
    assert found.residency == "one arm loaded at a time: as an engine is served"


def test_latency_and_memory_are_told_by_arm() -> None:
    found = run(Host())
    base, patched = found.latency["baseline"], found.latency["patched"]
    assert base.first_token_ms == pytest.approx(100)
    assert patched.per_token_ms < base.per_token_ms
    assert base.steps == 30
    assert base.between_ms["p50"] == pytest.approx(10, rel=0.02)
    assert base.between_ms["p99"] == base.between_ms["max"] == 20
    assert found.peak_memory_bytes == {"baseline": 10 * GIB, "patched": 10 * GIB + 1}
    one = of_processes(
        WORKLOAD,
        "p",
        found.comparison,
        found.windows,
        steps={},
        peak={"patched": [7, 9, 8, 30]},
        residency="",
        margin_pct=0.5,
        clocks=ClockMonitor("cpu"),
    )
    assert one.peak_memory_bytes == {"patched": 8}
    cv = found.repeat_cv_pct("baseline")
    assert cv is not None
    assert 0 < cv < 0.5
    assert Throughput.model_validate_json(found.model_dump_json()) == found


def test_no_process_outlives_one_that_dies() -> None:
    host = Host()
    host.dies_after = 30
    with pytest.raises(bench.PatcherError, match="last words"):
        run(host)
    assert not host.open


def test_each_process_is_visited_after_its_pairs() -> None:
    seen: list[tuple[str, str, int | None]] = []

    def visit(block: OpenBlock[Any], name: str, process: ScriptedProcess) -> None:
        pair = block.rounds[-1].pair(block.others[0])
        seen.append((pair.kind, name, pair.process))
        assert process in process.host.open

    run(Host(), visit=visit)
    assert seen[:2] == [("aa", BASELINE, 0), ("aa", CONTROL, 0)]
    assert len(seen) == 8
    run(Host(total=15), visit=visit)
    assert len(seen) == 16


def test_too_few_process_pairs_are_refused() -> None:
    with pytest.raises(bench.UsageError, match="2 process pairs"):
        compare_in_pairs(ABJob(workload=WORKLOAD, process_pairs=2), [], silent)


def test_the_presets_of_traffic_are_what_they_say() -> None:
    kforge = traffic("kforge")
    assert (kforge.requests, kforge.input_len, kforge.output_len) == (512, 1024, 8192)
    assert (kforge.batch, kforge.runs) == (8, 7)
    assert kforge.plan() == ABPlan(process_pairs=7, pairs=64)
    assert set(traffics()) == {"kforge", "quick"}
    with pytest.raises(bench.UsageError, match="unknown preset") as caught:
        traffic("slow")
    assert "kforge" in caught.value.hint


def asked(**given: Any) -> ThroughputOptions:
    fields = ("preset", "batch", "input_len", "output_len", "pairs", "processes")
    return ThroughputOptions(**{name: given.get(name) for name in fields})


def test_what_is_asked_for_is_the_job_that_is_done() -> None:
    vllm = WORKLOAD.model_copy(update={"engine": "vllm"})
    plain = job_of(asked(), WORKLOAD, False, [], 0.5, 32)
    assert plain.process_pairs == 0
    served = job_of(asked(), vllm, True, ["moe_backend=marlin", "max_num_seqs=8"], 0.5, 32)
    assert (served.process_pairs, served.pairs_each, served.tune) == (4, 16, True)
    assert served.arguments == {"moe_backend": "marlin", "max_num_seqs": 8}
    kforge = asked(preset="kforge", output_len=512)
    assert kforge.shape == (8, 1024, 512)
    found = job_of(kforge, vllm, False, [], 0.5, 32)
    assert (found.process_pairs, found.pairs_each) == (7, 64)
    fewer = job_of(asked(processes=4, pairs=30), WORKLOAD, False, [], 0.5, 32)
    assert (fewer.process_pairs, fewer.pairs_each) == (4, 8)
    nested = argument('compilation_config={"cudagraph_mode": "PIECEWISE"}')
    assert nested == ("compilation_config", {"cudagraph_mode": "PIECEWISE"})
    passes = [{"c": {"p": {"sp": True}, "mode": 1}, "n": 2}, {"c": {"p": {"fuse": False}}, "n": 3}]
    both = {"sp": True, "fuse": False}
    assert united(*passes) == {"c": {"p": both, "mode": 1}, "n": 3}
    assert united({"c": "none"}, passes[0]) == passes[0]


def test_what_does_not_go_together_is_refused() -> None:
    vllm = WORKLOAD.model_copy(update={"engine": "vllm"})
    for given, workload, tune_it, args, said in (
        ({"processes": 0}, vllm, False, [], "when a process starts"),
        ({"processes": 2}, vllm, False, [], "2 process pairs"),
        ({}, vllm, False, ["moe_backend"], "--engine-arg"),
        ({}, WORKLOAD, True, [], "no configuration to tune"),
        ({}, WORKLOAD, False, ["a=b"], "no configuration to tune"),
    ):
        with pytest.raises(bench.UsageError, match=said):
            job_of(asked(**given), workload, tune_it, args, 0.5, 32)
    found = tuned([[{"moe": "b"}]])
    assert job_of(asked(), vllm, False, [], 0.5, 32, found).tuned == found
    with pytest.raises(bench.UsageError, match="a search, and what one found"):
        job_of(asked(), vllm, True, [], 0.5, 32, found)
    with pytest.raises(bench.UsageError, match="no configuration to tune"):
        job_of(asked(), WORKLOAD, False, [], 0.5, 32, found)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["port=9000"], "patcher gives each engine its port"),
        (["host=0.0.0.0"], "patcher gives each engine its host"),
        (["model-path=other"], "patcher gives each engine its model_path"),
        (["dtype=float16"], "a dtype is an option of patcher"),
        (["a_b=1", "a_b=2"], "a_b is given twice"),
        (["a_b=1", "a-b=1"], "a_b is given twice"),
        (["moe=c"], "--engine-arg moe=c, and the search of --tuned chose b"),
    ],
)
def test_arguments_of_which_one_would_not_count_are_refused(args: list[str], said: str) -> None:
    vllm = WORKLOAD.model_copy(update={"engine": "vllm"})
    found = tuned([[{"moe": "b"}]]).model_copy(update={"chosen": {"moe": "b"}})
    with pytest.raises(bench.UsageError, match=said):
        job_of(asked(), vllm, False, args, 0.5, 32, found)
    same = job_of(asked(), vllm, False, ["moe=b", "a-b=1"], 0.5, 32, found)
    assert same.arguments == {"moe": "b", "a_b": 1}


def test_a_search_that_was_made_before_is_read(tmp_path: Path) -> None:
    found, file = tuned([[{"moe": "b"}]]), tmp_path / "stock.json"
    file.write_text(found.model_dump_json())
    assert read_tuning(file, WORKLOAD) == found
    assert read_tuning(file, WORKLOAD.model_copy(update={"batch": 1})) == found
    other = WORKLOAD.model_copy(update={"model": "another"})
    with pytest.raises(bench.UsageError, match=r"with other model$"):
        read_tuning(file, other)
    with pytest.raises(bench.UsageError, match=r"with other dtype$"):
        read_tuning(file, WORKLOAD.model_copy(update={"dtype": "float16"}))
    there = found.environment.model_copy(update={"device": "another", "packages": {"vllm": "1"}})
    file.write_text(found.model_copy(update={"environment": there}).model_dump_json())
    with pytest.raises(bench.UsageError, match="with other device, libraries"):
        read_tuning(file, WORKLOAD)
    file.write_text(found.model_copy(update={"workload": None}).model_dump_json())
    with pytest.raises(bench.UsageError, match="does not record which model and machine"):
        read_tuning(file, WORKLOAD)
    file.write_text('{"chosen": {}}')
    with pytest.raises(bench.UsageError, match="is no search"):
        read_tuning(file, WORKLOAD)
    with pytest.raises(bench.UsageError, match="cannot be read"):
        read_tuning(tmp_path / "other.json", WORKLOAD)


def launcher(tuning: Tuning | None, **arguments: JsonValue) -> ArmLauncher:
    vllm = WORKLOAD.model_copy(update={"engine": "vllm"})
    return ArmLauncher(ABJob(workload=vllm, process_pairs=3, arguments=arguments, tuned=tuning))


def patch_of(point: str) -> Any:
    return SimpleNamespace(manifest=SimpleNamespace(target=SimpleNamespace(point=point)))


ROUTE, NORM = patch_of("router.oai"), patch_of("add_norm")


def test_a_patch_is_held_against_the_configuration_that_it_is_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here another backend's logits are further off than any patch may be."""
    generator = torch.Generator().manual_seed(0)
    truth = {name: torch.randn(40, 50, generator=generator) for name in ("humming", "triton")}
    noise = {name: torch.randn(40, 50, generator=generator) * 1e-3 for name in "abc"}
    asked_for: list[tuple[str, Any]] = []

    @contextmanager
    def launch(
        self: ArmLauncher, name: str, arguments: dict[str, JsonValue], share: float, *_: Any
    ) -> Iterator[Any]:
        asked_for.append((name, arguments.get("moe_backend")))
        yield SimpleNamespace(
            name=name,
            backend=arguments["moe_backend"],
            ask=lambda *_: SimpleNamespace(percent=97.0),
        )

    def logits(
        self: QualityCheck, process: Any, tokens: Any, reference: bool = False
    ) -> tuple[torch.Tensor, str]:
        noisy = 0 if reference else noise["a"]
        return truth[process.backend] + noisy, "no compilation"

    monkeypatch.setattr(ArmLauncher, "launch", launch)
    monkeypatch.setattr(QualityCheck, "logits", logits)
    check = QualityCheck(launcher(None, moe_backend="humming"))
    own = Served(truth["humming"] + noise["a"], None)
    stock = own, own
    same, entropy = check.quality([NORM], Served(truth["humming"] + noise["b"], None), stock, [[1]])
    assert (same.passed, entropy) == (True, 97.0)
    assert same.reference == "no compilation"
    other, _ = check.quality([ROUTE], Served(truth["triton"] + noise["b"], None), stock, [[1]])
    assert other.passed
    assert other.reference == "no compilation, all with moe_backend=triton"
    hurt = Served(truth["triton"] + 10 * noise["c"], None)
    damaged, _ = check.quality([ROUTE], hurt, stock, [[1]])
    assert not damaged.passed
    assert asked_for == [
        ("reference", "humming"),
        ("reference", "triton"),
        ("unpatched", "triton"),
    ]


def test_patches_get_the_configuration_that_they_are_for() -> None:
    found = tuned([[{"moe_backend": "humming"}, {"moe_backend": "triton"}]])
    arms = launcher(found, max_num_seqs=8)
    assert arms.tuning(silent) is found
    assert arms.arguments == {"max_num_seqs": 8, "moe_backend": "humming"}
    assert arms.arguments_of([NORM]) == arms.arguments_of([]) == arms.arguments
    wanted = {"max_num_seqs": 8, "moe_backend": "triton"}
    assert arms.arguments_of([NORM, ROUTE]) == wanted
    # what nobody said is the engine's to choose
    assert launcher(None).arguments_of([ROUTE]) == {}
    assert engine_wants("vllm") == {"moe_backend": "triton"}
    assert engine_wants("transformers") == {}
    measured = arms.configured(run(Host()), [NORM, ROUTE], found)
    assert measured.patched_arguments == {"moe_backend": "triton"}
    assert arms.configured(run(Host()), [NORM], found).patched_arguments == {}


def test_what_was_measured_is_shown() -> None:
    found = run(Host())
    tuning = tuned([[{"moe": "broken"}, {"moe": "b"}]])
    update = {"tuning": tuning, "engine_arguments": tuning.chosen, "routing_entropy_pct": 97.5}
    update["patched_arguments"] = {"moe": "a"}
    console = Console(width=160, record=True, file=io.StringIO())
    for shown in throughput_lines(found.model_copy(update=update)):
        console.print(shown)
    text = console.export_text()
    for said in (
        *("patch: accept", "A/A control", "CV of repeats", "first token ms", "p99"),
        *("3 process pairs: a quick look: both arms loaded", "routing entropy: 97.5 % of uniform"),
        *("tried moe=broken: ValueError: not for this GPU", "baseline: moe=b", "clocks: "),
        "engine of the patched arm: moe=a",
    ):
        assert said in text, said


RATES = {"a": 1.02, "b": 1.05, "c": 0.9, "close": 1.051, "humming": 1.03}


def tuned(
    options: list[list[Mapping[str, JsonValue]]],
    stagger_s: float | None = None,
    room: int = 9,
    busy: int = 0,
    wanted: Mapping[str, JsonValue] | None = None,
) -> Any:
    """`busy`: so many starts fall into a time in which all is slower."""
    host = Host(bias_pct=0)
    started: list[str] = []

    def start(arguments: Mapping[str, JsonValue], share: float) -> ScriptedProcess:
        if arguments.get("moe") == "broken":
            raise bench.PatcherError(
                "File x\n[rank0]: ValueError: not for this GPU\n[rank0]:[W1] WARNING: no clean exit"
            )
        if arguments.get("moe") == "slow":
            started.append("slow")
            raise TooLateError("the baseline process does not answer: compiling 7 of 99")
        if len(host.open) >= room:
            raise bench.PatcherError("ValueError: no memory left")
        made = host.start("baseline", share)
        for name in ("moe", "moe_backend", "attention"):
            made.speed *= RATES.get(str(arguments.get(name)), 1.0)
        if len(host.started) <= busy:
            made.speed *= 0.96
        return made

    ScriptedSide.seeds = []
    clocks = ClockMonitor("cpu")
    found = tune(start, WORKLOAD, options, clocks, wanted=wanted, stagger_s=stagger_s)
    assert not host.open
    assert len(started) <= 1, "what took too long is not waited for twice"
    return found


def test_a_search_may_be_over_some_of_the_options() -> None:
    options = ({"moe": "a"}, {"moe": "b"}), ({"attention": "c"},)
    assert chosen_options(options, ["attention"]) == [options[1]]
    assert chosen_options(options, ()) == list(options)
    with pytest.raises(bench.UsageError) as raised:
        chosen_options(options, ["atention"])
    assert raised.value.hint == "choose of moe, attention"


def test_the_best_stock_configuration_is_the_baseline() -> None:
    moe: list[Mapping[str, JsonValue]] = [{"moe": name} for name in ("a", "broken", "b", "close")]
    attention: list[Mapping[str, JsonValue]] = [{"attention": "c"}, {"attention": "a"}]
    found = tuned([moe, attention])
    assert found.chosen == {"moe": "b", "attention": "a"}
    assert found.trials[0].arguments == {}
    assert found.trials[2].failure == "ValueError: not for this GPU"
    assert found.trials[2].tokens_per_s is None
    assert [trial.arguments for trial in found.trials[-2:]] == [{}, found.chosen]
    assert tuned([[{"attention": "c"}]]).chosen == {}
    # side by side, also where only two of four fit: those that do not are tried again alone
    for room in (9, 2):
        beside = tuned([moe, attention], stagger_s=0.0, room=room)
        assert beside.chosen == found.chosen
        for one, other in zip(beside.trials, found.trials, strict=True):
            assert (one.arguments, one.failure) == (other.arguments, other.failure)
    slow = tuned([[{"moe": "slow"}, {"moe": "b"}]], stagger_s=0.0)
    assert [one.failure for one in slow.trials] == ["", "it took too long to load", *[""] * 3]
    assert slow.chosen == {"moe": "b"}
    # the first trial, stock's own, was held up: all others look faster, which they are not
    assert tuned([[{"moe": "stock by name"}]], busy=1).chosen == {}
    with pytest.raises(bench.UsageError, match="no options to tune"):
        options_of("transformers")


def test_stock_is_tried_as_the_others_are() -> None:
    """A process may be slower alone than beside others: here by 4 %."""
    host = Host(bias_pct=0)

    def start(arguments: Mapping[str, JsonValue], share: float) -> ScriptedProcess:
        if arguments.get("moe") == "large" and len(host.open) > 1:
            raise bench.PatcherError("ValueError: no memory left")
        return host.start("baseline", share)

    class Lonely(ScriptedSide):
        def turn(self, steps: int) -> None:
            before = self.decode_s
            super().turn(steps)
            if len(host.open) == 1:
                self.decode_s = before + 1.04 * (self.decode_s - before)

    ScriptedSide.seeds = []
    ways: list[Mapping[str, JsonValue]] = [{"moe": "large"}, {"moe": "other"}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ScriptedProcess, "side", lambda self, shape=None: Lonely(self, WORKLOAD.batch)
        )
        found = tune(start, WORKLOAD, [ways], ClockMonitor("cpu"), stagger_s=0.0)
    assert not host.open
    assert found.chosen == {}
    rates = [trial.tokens_per_s for trial in found.trials]
    assert len(rates) == 3
    assert rates == [pytest.approx(rates[0], rel=0.005)] * 3

    def broken(arguments: Mapping[str, JsonValue], share: float) -> ScriptedProcess:
        if not arguments:
            raise bench.PatcherError("File x\nValueError: no such model")
        return host.start("baseline", share)

    for stagger_s in (None, 0.0):
        with pytest.raises(bench.PatcherError, match="stock does not run: ValueError: no such"):
            tune(broken, WORKLOAD, [ways], ClockMonitor("cpu"), stagger_s=stagger_s)
    assert not host.open


def test_what_patches_want_is_tried_by_itself() -> None:
    moe: list[Mapping[str, JsonValue]] = [{"moe": "a"}, {"moe": "b"}]
    attention: list[Mapping[str, JsonValue]] = [{"attention": "a"}]
    found = tuned([moe, attention], wanted={"moe": "c"})
    assert found.chosen == {"moe": "b", "attention": "a"}
    assert found.trials[-1].arguments == {"moe": "c", "attention": "a"}
    assert found.no_faster({"moe": "c", "attention": "a"})
    assert found.no_faster(found.chosen)
    assert not found.no_faster({"moe": "never tried"})
    assert not found.no_faster({"moe": "c"})
    # nothing more is tried where that is what was found, or nothing was
    assert len(tuned([moe], wanted={"moe": "b"}).trials) == 1 + 2 + 2
    assert len(tuned([[{"moe": "c"}]], wanted={"moe": "c"}).trials) == 1 + 1
    # held up, stock and `a` look slower than they are; side by side, what patches want is faster
    late = tuned([[{"moe": "c"}, {"moe": "close"}]], wanted={"moe": "b"}, busy=1)
    assert late.chosen == {"moe": "close"}
    best = tuned([[{"moe": "a"}]], wanted={"moe": "b"})
    assert best.chosen == {"moe": "b"}
    assert not best.model_copy(update={"chosen": {"moe": "a"}}).no_faster({"moe": "b"})


def test_the_best_stock_configuration_is_found_without_a_patch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = Host(bias_pct=0)
    choices = (({"moe": "a"}, {"moe": "b"}),)
    monkeypatch.setattr("patcher.bench.engines.vllm.VllmEngine.options", choices)

    def launch(
        arms: ArmLauncher, name: str, arguments: dict[str, JsonValue], share: float, **_: float
    ) -> ScriptedProcess:
        made = host.start(name, share)
        made.speed = RATES.get(str(arguments.get("moe")), 1.0)
        return made

    monkeypatch.setattr(ArmLauncher, "launch", launch)
    words = ["throughput", "tune", "gpt-oss-tiny", "--engine", "vllm", "--device", "cpu"]
    words += ["--batch", "2"]
    words += ["--also-batch", "1"]
    words += ["--out", str(tmp_path / "tuned.json")]
    assert app(words, standalone_mode=False) == 0
    assert not host.open
    said = capsys.readouterr()
    assert said.out.strip() == "baseline: moe=b"
    stage, *lines = said.err.splitlines()
    assert stage == "tune the baseline (stock; moe=a; moe=b): 0 of 6"
    assert [line.split(": ")[0] for line in lines] == [
        "tried stock",
        "tried moe=a",
        "tried moe=b",
        "tried stock",
        "tried moe=b",
    ]
    assert " at batch 1 and context " in lines[0]
    found = Tuning.model_validate_json((tmp_path / "tuned.json").read_text())
    assert [[one.batch for one in trial.other_workloads] for trial in found.trials] == [[1]] * 5
    assert [trial.arguments for trial in found.trials] == [
        {},
        {"moe": "a"},
        {"moe": "b"},
        {},
        {"moe": "b"},
    ]


def test_turns_are_cut_alike_for_both_ways_of_taking_turns() -> None:
    found = run(Host())
    timed = WORKLOAD.output_len - len(turn_lengths(WORKLOAD))
    assert {window.tokens for window in found.windows} == {WORKLOAD.batch * timed}


@pytest.mark.parametrize("compiles", [True, False])
def test_a_process_that_only_compiles_precedes_those_of_new_patches(
    compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def launch(self: ArmLauncher, name: str, *of: Any) -> Any:
        told.append(f"start {name}")
        return SimpleNamespace(
            warm_up=lambda seed, steps: told.append(f"{steps} steps"),
            close=lambda: told.append("end"),
        )

    monkeypatch.setattr(starts, "compiles", lambda engine: compiles)
    monkeypatch.setattr(ArmLauncher, "launch", launch)
    monkeypatch.setattr(ArmLauncher, "arguments_of", lambda self, patches: {})
    patch: Any = SimpleNamespace(manifest=SimpleNamespace(id="norm"))
    launcher = ArmLauncher(ABJob(workload=WORKLOAD, process_pairs=3), {"patched": [patch]})
    for name in (BASELINE, CONTROL, "patched", "patched", BASELINE):
        launcher.start(name, SHARE_ALONE)
    first = [f"start {BASELINE}", "8 steps", "end"] if compiles else []
    second = ["start patched", "8 steps", "end"] if compiles else []
    measured = [f"start {name}" for name in (BASELINE, CONTROL, "patched", "patched", BASELINE)]
    assert told == [*first, *measured[:2], *second, *measured[2:]]
