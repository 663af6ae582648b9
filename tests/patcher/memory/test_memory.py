"""Memory across runs: what it keeps, what it refuses, whose edits survive, what a prompt gets."""

from __future__ import annotations

import json
import math
import multiprocessing
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_sample import (
    GPU,
    HONEYTOKEN,
    OP,
    SWEEP,
    broken,
    evaluated,
)

from patcher.bench import (
    Language,
    Outcome,
    UsageError,
)
from patcher.memory import PROMOTED, Experience, Memory, Where, open_memory
from patcher.memory.entries import SHAPES, Gain, MemoryRule, Observation, shapes_of
from patcher.memory.files import MOST
from patcher.memory.patterns import failures, technique_in, techniques
from patcher.memory.recall import CHARACTERS
from patcher.memory.screen import phrase

CONTRACT = OP.contract


def improved(
    number: int,
    before: float | dict[int, float],
    after: float | Outcome | dict[int, float],
    change: str,
) -> Experience:
    return Experience(evaluated(number, after), "", evaluated(1000 + number, before), change)


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    return Memory(tmp_path / "memory")


def learn(memory: Memory, *seen: Experience, run: str = "run-1") -> None:
    memory.learn(run, CONTRACT, Language.CUDA, seen)


HERE = Where.of(CONTRACT, Language.CUDA, GPU)


def test_a_rule_enters_prompts_at_its_third_candidate(memory: Memory) -> None:
    for number in range(PROMOTED):
        assert memory.recall(HERE).text == ""
        name = f'identifier "{"xyz"[number]}" is undefined'
        learn(memory, broken(number, name), run=f"run-{number}")
    [rule] = memory.rules()
    assert (rule.count, rule.runs, rule.failure) == (3, 3, "undeclared name")
    assert rule.text.startswith("you cannot use a name without declaring it")
    assert " because " in rule.text
    text = memory.recall(HERE).text
    assert "You cannot use a name" in text
    assert "(3 times)" in text


def test_the_same_candidate_counts_once_whatever_the_run(memory: Memory) -> None:
    for run in ("a", "b", "a"):
        learn(memory, broken(1, 'identifier "x" is undefined'), run=run)
    assert [rule.count for rule in memory.rules()] == [1]
    again = memory.learn("c", CONTRACT, Language.CUDA, [broken(1, 'identifier "x" is undefined')])
    assert again.rules == ()


def test_a_diagnosis_is_kept_with_what_it_explains(memory: Memory) -> None:
    cause = "The row sum is accumulated in float16 and overflows"
    wrong = evaluated(1, Outcome.MISMATCH, check="values", detail="tokens=8: out: off by 3")
    learn(memory, Experience(wrong, "", cause=cause))
    other = evaluated(2, Outcome.MISMATCH, check="values", detail="tokens=1: out: off by 9")
    alike = "The sum of a row overflows: it is accumulated in float16"
    learn(memory, Experience(other, "", cause=alike))
    third = evaluated(3, Outcome.MISMATCH, check="values", detail="tokens=1: out: off by 9")
    learn(memory, Experience(third, "", cause="The mask of the tail block is wrong"))
    unexplained = evaluated(4, Outcome.MISMATCH, check="values", detail="out: off")
    learn(memory, Experience(unexplained, ""))
    first, second = memory.rules()
    assert first.count == 2
    assert "row sum is accumulated in float16 and overflows" in first.text
    assert "because the check of values fails" in first.text
    assert (second.count, "mask of the tail" in second.text) == (1, True)


def test_a_message_that_nobody_knows_is_kept_in_public_words(memory: Memory) -> None:
    learn(memory, broken(1, f'class "tvm::ffi::TensorView" has no member "{HONEYTOKEN}"'))
    learn(memory, broken(2, 'class "tvm::ffi::TensorView" has no member "other_thing"'))
    [rule] = memory.rules()
    assert rule.count == 2
    assert "because the compiler says: class tvm::ffi::TensorView has no member" in rule.text
    assert HONEYTOKEN not in rule.text


TRITON = """\
Traceback (most recent call last):
  File "runner.py", line 26, in call
    function(*tensors)
triton.compiler.errors.CompilationError: at 3:17:
def secret_kernel(x, BLOCK: tl.constexpr):
    # a power of 2, NameError: not this
    secret_hid = {quoted}
                 ^
{message}

"""


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            TRITON.format(
                quoted="tl.arange(0, 100)", message="arange's range must be a power of 2"
            ),
            "you cannot give tl.arange or a block a size that is no power of two",
        ),
        (
            TRITON.format(quoted="nope", message="NameError('secret_nope is not defined')"),
            "you cannot use a name without declaring it",
        ),
        (
            TRITON.format(
                quoted="a + b",
                message="Cannot make_shape_compatible: incompatible "
                "dimensions at index 0: 16 and 32",
            ),
            "says: cannot ...: incompatible dimensions at index 0: 16 and 32",
        ),
        (
            "x.cpp: In function 'void f()':\nx.cpp:3:5: error: too many arguments to function "
            "'int secret(int)'\n    3 |  secret(1, 2); // power of 2\n",
            "says: too many arguments to function int ... (int)",
        ),
        ('x.cu(3): error: expected a ";"\n  secret = 3\n', "says: expected a"),
        (
            "ptxas error   : Entry function '_Z6secret' uses too much shared data (0x10 bytes)",
            "you cannot declare more than 48 KiB of static shared memory",
        ),
        (
            "Traceback (most recent call last):\ntorch.AcceleratorError: CUDA error: an illegal "
            "memory access was encountered\nCUDA kernel errors might be reported later\n",
            "you cannot index outside of a tensor",
        ),
    ],
    ids=["arange", "name", "shapes", "g++", "nvcc", "ptxas", "torch"],
)
def test_what_tools_really_print_becomes_a_rule(memory: Memory, log: str, expected: str) -> None:
    evaluation = evaluated(1, Outcome.COMPILATION_FAILURE, log=log)
    learn(memory, Experience(evaluation, ""))
    [rule] = memory.rules()
    assert expected in rule.text
    assert "secret" not in rule.text


def test_what_a_user_forbids_is_no_rule_of_memory(memory: Memory) -> None:
    banned = evaluated(
        1, Outcome.GUARD_VIOLATION, check="tripwires", detail=f"the policy bans '{HONEYTOKEN}'"
    )
    learn(memory, Experience(banned, ""))
    assert memory.rules() == []


def test_a_gain_is_measured_against_the_parent_by_size_of_call(memory: Memory) -> None:
    sizes = [point.axes[SWEEP.axis] for point in SWEEP.points()]
    small, large = sizes[0], sizes[-1]
    before, after = {small: 1.0, large: 1.0}, {small: 2.0, large: 0.5}
    learn(memory, improved(1, before, after, "vectorise the loads"))
    gains = {gain.shapes: gain for gain in memory.techniques()}
    buckets = [
        shapes_of(CONTRACT.bytes_moved(point))
        for point in SWEEP.points()
        if point.axes[SWEEP.axis] in (small, large)
    ]
    assert buckets[0] == "under 1 MiB"
    assert gains[buckets[0]].gain == pytest.approx(2.0 if buckets[0] != buckets[1] else 1.0)
    for gain in gains.values():
        assert (gain.technique, gain.family) == ("vector loads", "norm")
        assert (gain.device, gain.architecture, gain.language) == ("NVIDIA H200", "sm_90", "cuda")


def test_mean_and_spread_are_those_of_all_gains(memory: Memory) -> None:
    ratios = [1.1, 0.9, 1.3, 1.05]
    for number, ratio in enumerate(ratios):
        learn(memory, improved(number, 1.5, 1.5 * ratio, "Vectorise it"), run=f"run-{number}")
    learn(memory, improved(9, 1.5, Outcome.MISMATCH, "vectorise more"))
    for gain in memory.techniques():
        logs = [math.log(ratio) for ratio in ratios]
        assert (gain.count, gain.failed) == (4, 1)
        assert gain.gain == pytest.approx(math.exp(statistics.fmean(logs)), rel=1e-4)
        assert gain.spread_pct == pytest.approx(100 * statistics.stdev(logs), rel=1e-3)


def test_speedups_over_different_baselines_are_no_gain(memory: Memory) -> None:
    seen = improved(1, 1.0, 2.0, "vectorise")
    other = seen.evaluation.model_copy(update={"baseline": "eager"})
    learn(memory, Experience(other, "", seen.parent, seen.change))
    assert memory.techniques() == []


def test_learning_twice_changes_nothing(memory: Memory) -> None:
    seen = [improved(1, 1.0, 1.2, "unroll"), broken(2, 'identifier "x" is undefined')]
    learn(memory, *seen)
    files = [path.read_bytes() for path in sorted(memory.folder.glob("*.toml"))]
    learn(memory, *seen)
    assert [path.read_bytes() for path in sorted(memory.folder.glob("*.toml"))] == files


def test_edits_survive_and_a_deleted_entry_is_gone(memory: Memory) -> None:
    learn(memory, broken(1, 'identifier "x" is undefined'), broken(2, "too many cooks in function"))
    path = memory.folder / "rules.toml"
    text = path.read_text()
    first, second = memory.rules()
    text = text.replace(first.text, "you cannot do that because I say so")
    text = text.replace("[[rule]]", "# mine\n[[rule]]", 1)
    text = text[: text.index(f'id = "{second.id}"')].rpartition("[[rule]]")[0]
    path.write_text(text)
    learn(memory, broken(3, 'identifier "y" is undefined'))
    [rule] = memory.rules()
    assert (rule.text, rule.count) == ("you cannot do that because I say so", 2)
    assert "# mine" in path.read_text()


@pytest.mark.parametrize(
    "text",
    [
        '[[rule]]\ntext = "a"',
        '[[rule]]\r\ntext = "a"  # mine\r\n',
        "# nothing yet",
        '# top\n\n  [[ rule ]]\n  text = "a"   # why\n\n\n# end\n',
        '[[rule]]\ncount = 2\ntext = "a"\nseen = [\n  "x-y", # one\n]\n\n[[rule]]\ntext = "b"\n',
    ],
)
def test_whatever_a_person_wrote_can_be_added_to(memory: Memory, text: str) -> None:
    memory.folder.mkdir()
    path = memory.folder / "rules.toml"
    path.write_bytes(text.encode())
    before = memory.rules()
    for number in range(2):
        learn(memory, broken(number, 'identifier "x" is undefined'))
    assert memory.rules()[:-1] == before
    assert memory.rules()[-1].count == 2
    for comment in re.findall(r"#[^\r\n]*", text):
        assert comment in path.read_text()
    memory.forget([memory.rules()[-1].id])
    assert memory.rules() == before


def test_a_rule_by_hand_needs_only_its_text_and_a_muted_one_is_not_shown(memory: Memory) -> None:
    memory.folder.mkdir()
    path = memory.folder / "rules.toml"
    path.write_text('[[rule]]\ntext = "you cannot whistle because I say so"\n')
    assert "You cannot whistle" in memory.recall(HERE).text
    path.write_text(path.read_text() + "muted = true\n")
    assert memory.recall(HERE).text == ""


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ('[[rule]]\ntext = "a"\n\n[[rule]]\ntext = "b\n', 5, "Illegal character"),
        ('# hello\n[[rule]]\ntext = "a"\ncount = "many"\n', 4, "count"),
        ('[[rule]]\ntext = "a"\n\n[[rule]]\ncount = 3\n', 4, "text"),
        ('[[rule]]\ntext = "a"\n[[rule]]\ntext = "b"\nlanguage = "cobol"\n', 5, "language"),
        ('[[rule]]\ntext = "a"\nid = "x"\n[[rule]]\ntext = "b"\nid = "x"\n', 6, "twice"),
        ('[[rule]]\ntext = "a"\ncuont = 1\n', 3, "cuont"),
        ('[[rule]]\ntext = "a"\n\n[rules]\ntext = "b"\n', 4, "rules"),
        ('\nrule = [{text = "a"}]\n', 2, "begins with a line"),
        ('[[rule]]\ntext = """a\nb"""\n', 2, "text"),
    ],
)
def test_a_broken_edit_names_its_line(memory: Memory, text: str, line: int, problem: str) -> None:
    memory.folder.mkdir()
    (memory.folder / "rules.toml").write_text(text)
    for use in (lambda: memory.recall(HERE), lambda: learn(memory, broken(1, "expected a ;"))):
        with pytest.raises(UsageError) as caught:
            use()
        assert re.search(rf"line {line}\b", caught.value.message), caught.value.message
        assert problem in caught.value.message
        assert str(memory.folder / "rules.toml") in caught.value.hint
    assert (memory.folder / "rules.toml").read_text() == text


def test_forget(memory: Memory) -> None:
    learn(memory, broken(1, 'identifier "x" is undefined'), improved(2, 1.0, 1.5, "unroll"))
    [rule] = memory.rules()
    with pytest.raises(UsageError, match="no entry 'nonsense'"):
        memory.forget([rule.id, "nonsense"])
    assert memory.forget([rule.id]) == (rule.id,)
    assert memory.rules() == []
    assert memory.techniques()


def test_the_nearest_come_first_and_the_block_is_bounded(memory: Memory) -> None:
    memory.folder.mkdir()

    def gain(name: str, **more: object) -> str:
        values = {
            **{"text": name, "technique": "", "family": "norm", "shapes": SHAPES[0]},
            **{"device": "NVIDIA H200", "architecture": "sm_90", "language": "cuda"},
            **{"count": 2, "gain": 1.1, "id": name, **more},
        }
        return "[[technique]]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items())

    entries = [
        gain("other family", family="rope", gain=3.0),
        gain("other card", device="NVIDIA B200", architecture="sm_100", gain=2.0),
        gain("other language", language="triton", gain=1.5),
        gain("here", gain=0.9),
        gain("a processor", architecture="cpu", device="a CPU", gain=9.0),
        *(gain(f"filler {number} " + "x" * 300, family="moe") for number in range(60)),
    ]
    (memory.folder / "techniques.toml").write_text("\n".join(entries))
    found = memory.recall(HERE)
    assert found.techniques[:4] == ("here", "other language", "other card", "other family")
    assert "a processor" not in found.text
    assert len(found.text) <= CHARACTERS
    rules = "\n".join(f'[[rule]]\ntext = "you cannot {n} {"y" * 380}"' for n in range(30))
    (memory.folder / "rules.toml").write_text(rules)
    both = memory.recall(HERE)
    assert len(both.text) <= CHARACTERS
    assert both.rules
    assert both.techniques


def test_a_rule_of_another_language_is_not_told(memory: Memory) -> None:
    for number in range(3):
        learn(memory, broken(number, 'identifier "x" is undefined'))
    assert memory.recall(HERE.model_copy(update={"language": Language.TRITON})).text == ""


def test_what_is_seen_least_goes_first(memory: Memory) -> None:
    memory.folder.mkdir()
    text = "\n".join(f'[[rule]]\ntext = "you cannot {n}"\ncount = {n + 2}' for n in range(MOST))
    (memory.folder / "rules.toml").write_text(text)
    for number in range(3):
        learn(memory, broken(number, 'identifier "x" is undefined'))
    texts = [rule.text for rule in memory.rules()]
    assert len(texts) == MOST
    assert not any("declaring" in text for text in texts), "seen once, and there is no room"
    assert "you cannot 0" in texts


def _learner(folder: str, worker: int) -> None:
    for number in range(4):
        one = broken(100 * worker + number, 'identifier "x" is undefined')
        learn(Memory(Path(folder)), one, run=f"run-{worker}")


def test_runs_at_the_same_time_lose_nothing(memory: Memory) -> None:
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=_learner, args=(str(memory.folder), worker)) for worker in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    [rule] = memory.rules()
    assert (rule.count, rule.runs) == (16, 4)
    assert not list(memory.folder.glob(".rules*")), "nothing half-written is left"


def _endless_learner(folder: str, told: Any) -> None:
    number = 0
    while True:
        learn(Memory(Path(folder)), broken(number, 'identifier "x" is undefined'))
        number += 1
        told.send(number)


def test_kill_leaves_a_whole_file_and_no_lock(memory: Memory) -> None:
    context = multiprocessing.get_context("fork")
    for at in range(1, 6):
        ours, theirs = context.Pipe()
        worker = context.Process(target=_endless_learner, args=(str(memory.folder), theirs))
        worker.start()
        learned = [ours.recv() for _ in range(2 * at)][-1]
        worker.kill()
        worker.join(60)
        assert worker.exitcode == -9
        [rule] = memory.rules()
        assert rule.count >= learned
        learn(memory, broken(100_000 + at, 'identifier "x" is undefined'))
        assert memory.rules()[0].count == rule.count + 1
        memory.forget([rule.id])
    assert [path.name for path in memory.folder.glob(".*")] == [".lock"]


def test_a_link_stays_a_link(memory: Memory, tmp_path: Path) -> None:
    memory.folder.mkdir()
    (tmp_path / "dotfiles.toml").write_text("")
    (memory.folder / "rules.toml").symlink_to(tmp_path / "dotfiles.toml")
    learn(memory, broken(1, 'identifier "x" is undefined'))
    assert (memory.folder / "rules.toml").is_symlink()
    assert "declaring" in (tmp_path / "dotfiles.toml").read_text()


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        learn(Memory(tmp_path / "file"), broken(1, 'identifier "x" is undefined'))


def test_settings_say_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATCHER_HOME", str(tmp_path))
    assert open_memory("off") is None
    on, own = open_memory("on"), open_memory("team")
    assert on is not None
    assert own is not None
    assert (on.folder, own.folder) == (tmp_path / "memory", Path("team"))


# What must never get in


def leaky() -> list[Experience]:
    """A honeytoken wherever a run's texts could carry one."""
    secret = f"{HONEYTOKEN} sk-ant-{HONEYTOKEN} /home/{HONEYTOKEN}/x 4111111111111111"
    source = f'// {secret}\n__global__ void {HONEYTOKEN}() {{ char* key = "{secret}"; }}\n'
    log = f'unit.cu(1): error: no instance of function "{HONEYTOKEN}" matches the argument list\n'
    python = f"Traceback (most recent call last):\nValueError: invalid value {secret} in the list\n"
    wrong = evaluated(3, Outcome.MISMATCH, check="values", detail=f"{HONEYTOKEN}: off")
    ends = evaluated(4, Outcome.RUNTIME_ERROR, check="runs", detail=secret, log=python)
    return [
        Experience(evaluated(1, Outcome.COMPILATION_FAILURE, log=log), source, cause=secret),
        Experience(wrong, source, cause=f"the value of {secret} is wrong in the last row"),
        Experience(ends, source, cause=f"{HONEYTOKEN} is read before it is set"),
        improved(5, 1.0, 1.5, f"rename the {HONEYTOKEN} kernel and read {secret} just once more"),
        improved(6, 1.0, 1.5, f"vectorise {secret}"),
        improved(7, 1.0, 1.5, secret),
    ]


def test_a_honeytoken_never_reaches_memory(memory: Memory) -> None:
    learn(memory, *leaky(), run=f"20260101-{HONEYTOKEN}")
    written = [path.read_text() for path in memory.folder.iterdir() if path.is_file()]
    assert memory.rules()
    assert memory.techniques()
    for text in (*written, memory.recall(HERE).text):
        for part in (HONEYTOKEN, "honey", "9f8e7d6c", "4111", "sk-ant"):
            assert part not in text.lower()


def test_an_op_of_the_user_gives_only_a_public_word(memory: Memory) -> None:
    own = CONTRACT.model_copy(update={"operation": HONEYTOKEN, "name": HONEYTOKEN})
    seen = [broken(1, 'identifier "x" is undefined'), improved(2, 1.0, 1.5, "unroll the loop")]
    memory.learn("run", own, Language.CUDA, seen)
    assert {gain.family for gain in memory.techniques()} == {"other"}
    assert memory.rules()[0].families == ("other",)


def test_words_that_a_source_has_in_a_row_are_refused() -> None:
    comment = "keep the sum of each row in float32 until the end"
    source = f"// {comment}\nint f();\n"
    assert phrase(comment, []) == comment
    assert phrase(f"You should {comment}, always", [source]) is None
    assert phrase("keep the row in float32", [source]) == "keep the row in float32"


def test_code_is_refused() -> None:
    code = "for (int q = tid; q < hid_sz; q += bdx) acc_v += ld_row(q) * sc_p[q];"
    assert phrase(code, []) is None
    assert phrase("s e c r e t k e y is here", []) is None


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=200), st.sampled_from([technique.says for technique in techniques()]))
def test_only_listed_words_pass_whatever_comes(noise: str, says: str) -> None:
    from patcher.memory.screen import _LETTERS, _NUMBERS, _TOKEN, LONGEST, _stems, vocabulary

    found = phrase(f"{says} {HONEYTOKEN} {noise}", [])
    if found is None:
        return
    assert len(found) <= LONGEST
    assert HONEYTOKEN not in found
    for token in _TOKEN.findall(found.replace("...", "")):
        if token[0].isdigit():
            assert token in _NUMBERS
        elif token[0].isalpha() or token[0] == "_":
            assert len(token) > 1 or token in _LETTERS
            parts = [token] if token.lower() in vocabulary() else token.split("-")
            for part in parts:
                known = (part.lower(), *_stems(part.lower()))
                assert part in _NUMBERS or any(word in vocabulary() for word in known)


@pytest.mark.parametrize("known", [*techniques(), *failures()], ids=lambda known: known.name)
def test_what_is_known_is_found_and_no_more(known: object) -> None:
    assert hasattr(known, "regex")
    for text in known.hits:  # type: ignore[attr-defined]
        assert known.regex.search(text), text
    for text in known.misses:  # type: ignore[attr-defined]
        assert not known.regex.search(text), text


def test_the_technique_named_first_counts() -> None:
    found = technique_in("Stage the tile in shared memory, then vectorise the loads")
    assert found is not None
    assert found.name == "shared memory"


def test_known_texts_are_of_listed_words() -> None:
    for known in (*techniques(), *failures()):
        assert "..." not in (phrase(known.says, []) or "...")


def test_sightings_name_neither_run_nor_candidate() -> None:
    sighting = Observation.of("20260101-secret-model", "f" * 64)
    assert re.fullmatch(r"[0-9a-f]{10}-[0-9a-f]{10}", str(sighting))


def test_entries_are_of_one_line() -> None:
    for text in ("", "a\nb", "x" * 401):
        with pytest.raises(ValueError, match="text"):
            MemoryRule(text=text)
    with pytest.raises(ValueError, match="shapes"):
        Gain(
            text="x",
            technique="",
            family="norm",
            shapes="huge",
            device="d",
            architecture="cpu",
        )
