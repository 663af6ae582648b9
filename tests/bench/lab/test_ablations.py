"""Ablations: whole runs of a small plan, stopped and resumed, and the table over what is there."""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from agent_sample import OP, advice, diagnosis, verdict

from patcher.bench import Candidate, Evaluation, Language
from patcher.bench.lab import ablations
from patcher.bench.lab.ablations import BASE, VARIANTS, AblationPlan, main, rows_of, run_all
from patcher.bench.lab.loop_runs import geomean_of, mean_of, share_of
from patcher.kernel_search import stage
from patcher.settings import resolve

KEPT = Path(__file__).parents[3] / "bench/results/loop"


class FixedJudge:
    """In place of the judge: a speedup by the number that ends the source."""

    def prepare(self, candidates: object) -> None:
        """Nothing is built."""

    def evaluate(self, candidates: list[Candidate]) -> list[Evaluation]:
        return [verdict(one, float(one.source.rsplit("// ")[-1])) for one in candidates]


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    @contextmanager
    def judges(*_: object, **__: object) -> Iterator[FixedJudge]:
        yield FixedJudge()

    monkeypatch.setattr(stage, "open_judges", judges)
    monkeypatch.setattr(stage, "require_same_device", lambda _, found: found)
    monkeypatch.chdir(tmp_path)


def answer(folder: Path) -> int:
    """Answer every prompt that waits: the analyst's kernels are twice as fast, and others that a
    seed makes."""
    count = 0
    for prompt in sorted(folder.rglob("*.prompt.md")):
        reply = prompt.with_name(prompt.name.replace(".prompt.md", ".reply.md"))
        if reply.is_file():
            continue
        count += 1
        text = prompt.read_text()
        if "ask-analyse" in prompt.name:
            said = advice("unroll the loop four times")
        elif "ask-diagnose" in prompt.name:
            said = diagnosis("it is wrong")
        else:
            seed = int(prompt.parts[-3].removeprefix("seed-"))
            speed = 1.5 + 0.25 * seed + (1.0 if "unroll the loop four times" in text else 0.0)
            number = prompt.name.split("-")[0]
            said = f"```cpp\nvoid {prompt.parts[-2]}() {{ int x{number}; }} // {speed}\n```\n"
        reply.write_text(said)
    return count


WORDS = [OP, "rope", "--iterations", "2", "--seeds", "1"]
CHOSEN = ["--variant", "no analyst"]


def test_one_command_goes_on_until_the_table_is_whole(
    judge: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = [*WORDS, *CHOSEN, "--model", f"exchange:{tmp_path / 'prompts'}", "--out", str(out)]
    codes = [main(words)]
    shown = capsys.readouterr().out
    assert f"| {BASE} | 0 of 2 | 0 |" in shown
    assert "waits for the op before it" in shown
    while codes[-1] == 6:
        assert answer(tmp_path / "prompts")
        codes.append(main(words))
    assert codes[-1] == 0
    rows = {row["variant"]: row for row in json.loads((out / "table.json").read_text())}
    assert list(rows) == [BASE, "no analyst"]
    assert all(
        row["runs"] == 2 and row["right"] == 2 and not row["partial"] for row in rows.values()
    )
    assert rows[BASE]["gain"]["value"] == pytest.approx(2.5)
    assert rows["no analyst"]["against"]["value"] == pytest.approx(1.5 / 2.5)
    assert (rows["no analyst"]["pairs"], rows["no analyst"]["only_base"]) == (2, 0)
    runs = list((out / "runs").rglob("run.json"))
    assert len(runs) == 4
    assert (out / "ablations.md").read_text() in capsys.readouterr().out

    prompts = len(list((tmp_path / "prompts").rglob("*.prompt.md")))
    assert main(words) == 0  # nothing is left to do
    assert len(list((tmp_path / "prompts").rglob("*.prompt.md"))) == prompts
    assert main([*words, "--sweep", "cpu"]) == 2
    assert main([*words, "--iterations", "0"]) == 2
    assert "another plan" in capsys.readouterr().err


def test_what_has_not_ended_is_no_figure(judge: None, tmp_path: Path) -> None:
    plan = AblationPlan(
        ops=(OP,),
        language=Language.CPP,
        model=f"exchange:{tmp_path / 'prompts'}",
        iterations=1,
        seeds=(0,),
        variants=(BASE, "no memory"),
    )
    run_all(plan, tmp_path, lambda _: None)
    answer(tmp_path / "prompts" / "all-parts")
    unfinished = run_all(plan, tmp_path, lambda _: None)
    base, other = rows_of(plan, tmp_path, unfinished)
    assert (base.runs, base.partial, base.gain is not None) == (1, (), True)
    assert (other.runs, other.pairs, other.gain, other.against) == (0, 0, None, None)
    assert "waiting: " in other.partial[0]
    kept = {
        name: json.loads(next((tmp_path / "runs" / name).rglob("run.json")).read_text())
        for name in ("all-parts", "no-memory")
    }
    assert kept["all-parts"]["settings"]["memory"] == str(tmp_path / "memory" / "all-parts" / "0")
    assert kept["no-memory"]["settings"]["memory"] == "off"


def test_a_width_is_of_the_variants_that_ask_several_together(
    judge: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [OP, "--iterations", "4", "--seeds", "1", "--variant", "beam", "--width", "2"]
    prompts = tmp_path / "prompts"
    assert main([*words, "--model", f"exchange:{prompts}", "--out", str(tmp_path / "out")]) == 6
    assert "4 iterations, 2 a round of beam and evolve; means" in capsys.readouterr().out
    asked = {
        slug: len(list((prompts / slug).rglob("*.prompt.md"))) for slug in ("all-parts", "beam")
    }
    assert asked == {"all-parts": 1, "beam": 2}


def test_the_seed_of_an_entry_is_that_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    entry = {"provider": "openai", "model": "m", "base_url": "http://localhost:1/v1"}
    entries = {"a": {**entry, "sampling": {"seed": 1, "top_p": 0.5}}, "b": entry}
    monkeypatch.setenv("PATCHER_MODELS", json.dumps(entries))
    with ablations.seeded("a", 7):
        models = resolve().models
        assert models["a"].sampling == {"seed": 7, "top_p": 0.5}
        assert models["b"].base_url == entry["base_url"]
    with ablations.seeded("b", 7):
        assert resolve().models["a"].sampling["seed"] == 1


def test_intervals() -> None:
    assert geomean_of([2.0]).low is None
    three = geomean_of([1.0, 2.0, 4.0])
    assert three.value == pytest.approx(2.0)
    assert three.low == pytest.approx(2.0 ** (1 - 4.302653 / 3**0.5), rel=1e-5)
    repeated = geomean_of([1.0, 2.0, 4.0] * 4, ["a", "b", "c"] * 4)
    assert repeated.low == pytest.approx(three.low)  # more seeds are no more problems
    assert mean_of([1.0, 3.0]).high == pytest.approx(2 + 12.7062, rel=1e-4)
    share = share_of(5, 10)
    assert (share.low, share.high) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert share_of(0, 4).low == 0


def test_every_variant_names_settings_that_there_are() -> None:
    assert set(VARIANTS) >= {BASE, "no analyst", "no counters", "no memory", "beam", "evolve"}
    for variant in VARIANTS.values():
        resolve(dict(variant.settings))


def test_what_each_part_brings_on_a_gpu() -> None:
    kept = json.loads(lzma.decompress((KEPT / "ablations-gpu.json.xz").read_bytes()))
    page = (KEPT / "README.md").read_text(encoding="utf-8")
    _, _, page = page.partition("## What each part brings, on a GPU")
    loops = {(each["variant"], each["op"]): each for each in kept["loops"]}
    ops = sorted({op for _, op in loops})
    best = {place: max(each["speedups"][1:]) for place, each in loops.items()}
    for name, asked in kept["asked"].items():
        firsts = [
            [each["speedups"][0] for (_, op), each in loops.items() if op == at] for at in ops
        ]
        bases = [math.exp(sum(map(math.log, three)) / 3) for three in firsts]
        gain = geomean_of([best[name, op] / base for op, base in zip(ops, bases, strict=True)], ops)
        against = geomean_of([best[name, op] / best["no analyst", op] for op in ops], ops)
        thousands = (asked["prompt_bytes"] + asked["reply_bytes"]) / 3500 / 5
        [line] = [line for line in page.splitlines() if line.startswith(f"| {name}")]
        assert f"| {gain.value:.2f} ({gain.low:.2f} to {gain.high:.2f}) |" in line
        if name != "no analyst":
            assert f"| {against.value:.2f} ({against.low:.2f} to {against.high:.2f}) |" in line
        assert f"| {asked['prompts'] // 5}, {thousands:.0f} |" in line
    advised = [each for each in loops.values() if "advice" in each]
    slower = sum(each["speedups"][1] < each["speedups"][0] for each in advised)
    met = sum(
        measured >= advice["expected"]
        for each in advised
        for advice, measured in zip(each["advice"], each["speedups"][1:], strict=True)
    )
    assert (len(advised), slower, met) == (10, 7, 1)
    assert "seven of ten candidates were slower for it, and one of 20 expectations" in page
