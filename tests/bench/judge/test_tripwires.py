"""Tripwires: every rule by its own examples, the stripper, policies, and what the corpus shows."""

from __future__ import annotations

import io
import re
import time
import tokenize
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from patcher.bench import Candidate, Language, Outcome, UsageError, guess_language, load_op
from patcher.bench.judge import JudgeSettings, TripwirePolicy, evaluate, stripping
from patcher.bench.judge.stripping import Views, views
from patcher.bench.judge.tripwires import LONGEST, TripwireRule, Tripwires, look, rules
from patcher.bench.selftest.cases import read_source
from patcher.levers import record as levers
from patcher.settings import resolve

CORPUS = Path(__file__).parents[2] / "corpus"
HEADER = re.compile(r"\A(?:(?:#|//) \w+:.*\n)+")
RULES = [pytest.param(rule, id=f"{rule.name}-{rule.languages[0]}") for rule in rules()]
NOTICED = {"evidence": 102, "note": 31}
"""Cheats of which the source shows so much at least; `pytest -s` lists the others."""


def seen(
    source: str, language: Language = Language.CPP, policy: TripwirePolicy | None = None
) -> Tripwires:
    return look(Candidate(op="linear", language=language, source=source), True, policy)


def corpus(kind: str) -> Iterator[tuple[str, Tripwires]]:
    """Each file without its header, which names the very things that rules look for."""
    for path in sorted((CORPUS / kind).glob("*.*")):
        source = read_source(path)
        yield path.name, seen(HEADER.sub("", source), guess_language(path, source))


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_by_its_examples(rule: TripwireRule) -> None:
    for language in rule.languages:
        assert not rule.lines(views("", language))
        for example in rule.misses:
            assert not rule.lines(views(example, language)), f"{example} in {language}"
    # an example is written in Python or in a relative of C++
    shared = len({language.in_python for language in rule.languages}) > 1
    for example in rule.hits:
        found = [bool(rule.lines(views(example, language))) for language in rule.languages]
        assert any(found) if shared else all(found), example


def test_no_name_stands_for_two_things() -> None:
    pairs = [(rule.name, language) for rule in rules() for language in rule.languages]
    assert len(pairs) == len(set(pairs))
    assert {rule.level for rule in rules()} == {"note", "evidence"}


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("f(a // b\n);", "f(a \n);"),
        ("a /* b\n * c */ d", "a \n d"),
        ('"a // b" "\\"" c', '"" "" c'),
        ("1'000'000 + 'x' + u8'y'", '1\'000\'000 + "" + ""'),
        ('R"x(a)" // b)x" c', '"" c'),
        ('FOOR"(" a', 'FOOR"" a'),
        ("a // b \\\nc\nd", "a \n\nd"),
        ("dl\\\nopen(x)", "dlopen(x)\n"),
        ("'\"' a '\"' b", '"" a "" b'),
        ('"never closed\nb', '""\nb'),
        ("/* never closed", " "),
        ('R"(never closed', '""'),
        ("std :: this_thread\t::  x -> y", "std::this_thread::x->y"),
    ],
)
def test_strips_cpp(source: str, code: str) -> None:
    found = views(source, Language.CUDA).code
    assert found.rstrip() == code.rstrip()
    assert found.rstrip("\n").count("\n") <= source.count("\n")


@pytest.mark.parametrize(
    ("source", "text", "code"),
    [
        ('"""Doc."""\nx = 1  # c', " \nx = 1 ", " \nx = 1 "),
        ('def f():\n    """Doc.\n    More."""\n    g("# no")', None, 'def f():\n \n\n g("")'),
        ('f(\n  "a"\n)', 'f(\n "a"\n)', 'f(\n ""\n)'),
        ("x = f'{os._exit(0)} {{no}}'", None, 'x = ""{os._exit(0)'),
        ("x = rb'\\' + y' + z", None, 'x = "" + z'),
        ("os . \\\n _exit", "os._exit", "os._exit"),
        ("x = '''never closed\ny", None, 'x = ""'),
        ("ｅｘｅｃ(x)", "exec(x)", "exec(x)"),  # noqa: RUF001
        ("a = b'#' # c", "a = b'#' ", 'a = "" '),
    ],
)
def test_strips_python(source: str, text: str | None, code: str) -> None:
    found = views(source, Language.TORCH)
    assert found.code.rstrip() == code.rstrip()
    assert text is None or found.text.rstrip() == text.rstrip()


def test_agrees_with_tokenize_and_keeps_the_lines() -> None:
    compared = 0
    for path in chain(CORPUS.rglob("*.py"), Path(__file__).parents[3].rglob("bench/**/*.py")):
        source = path.read_text(encoding="utf-8")
        if not source.isascii() or "\\\n" in source:
            continue
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        expected = [token.string for token in tokens if token.type == tokenize.COMMENT]
        found = list(stripping._PYTHON.finditer(source))
        assert [match[0] for match in found if match["comment"] is not None] == expected
        seen_as = views(source, Language.TORCH)
        lines = len(source.splitlines())
        assert {len(seen_as.text.splitlines()), len(seen_as.code.splitlines())} == {lines}, path
        compared += 1
    assert compared > 100


def test_words_in_comments_and_strings_are_nobodys_fault() -> None:
    source = '// no cudaStreamCreate, no fork()\nconst char* s = "std::thread x; 1 ## 2";\n'
    assert seen(source.replace("std::thread x; ", "")).as_text() == ()
    python = '"""Never calls os._exit or torch.matmul."""\nx = 1  # exec("y")\n'
    assert seen(python, Language.TORCH).as_text() == ()


def test_says_what_and_where() -> None:
    found = seen("\n\n#define JOIN(a, b) a##b\n__expf(x);\n")
    assert [said.split(":")[0] for said in found.as_text()] == [
        "fast math (evidence, line 4)",
        "made code (evidence, line 3)",
    ]
    assert found.evidence == 1
    many = seen("os._exit(0)\n" * 9, Language.TRITON)
    assert many.as_text()[0].startswith("exits (evidence, lines 1, 2, 3, ...): ")
    assert seen("asm(x);").evidence == 0


def test_switched_off_it_sees_a_declaration_only() -> None:
    source = "// patcher: nondeterministic\nstd::thread x;"
    found = look(Candidate(op="linear", language=Language.CPP, source=source), False)
    assert found == Tripwires(declares_nondeterminism=True)
    assert seen(source).declares_nondeterminism
    assert not seen("// nondeterministic").declares_nondeterminism


def test_only_a_policy_refuses() -> None:
    policy = TripwirePolicy(
        banned=(r"\bcublas\w*", "^x"), required=("__global__",), ignore=("library",)
    )
    assert not seen("__global__ void f() {} // cublas", Language.CUDA, policy).refused
    found = seen('\ndlopen("libcublas.so"); cublasCreate(&h);\n', Language.CUDA, policy)
    assert found.refused == (
        r"the policy bans '\\bcublas\\w*': line 2",
        "the policy requires '__global__', which is not in the source",
    )
    assert not any(said.startswith("library") for said in found.as_text())
    assert any(said.startswith("loads code") for said in found.as_text())


def test_a_policy_reaches_the_verdict() -> None:
    source = "void linear() {}  // not even built\nint cublas;"
    candidate = Candidate(op=load_op("fused_add_rms_norm").name, language=Language.CPP, source="")
    candidate = candidate.model_copy(update={"source": source.replace("linear", candidate.op)})
    evaluation = evaluate(candidate, JudgeSettings(policy=TripwirePolicy(banned=("cublas",))))
    assert evaluation.outcome is Outcome.GUARD_VIOLATION
    assert evaluation.failed_checks[0].name == "tripwires"
    assert evaluation.failed_checks[0].detail == "the policy bans 'cublas': line 2"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("banned = ['(']", r"'\(' is not a regular expression: missing \)"),
        ("required = ['a', '[']", r"'\['"),
        ("ignore = ['libary']", "no rule is called 'libary'"),
        ("baned = ['x']", "tripwires.baned = .*Extra inputs"),
        ("banned = 'x'", "tripwires.banned = .*tuple"),
    ],
)
def test_a_wrong_policy_is_one_clear_error(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "patcher.toml").write_text(f"[tripwires]\n{content}\n")
    with pytest.raises(UsageError, match=said):
        resolve(environ={}, folder=tmp_path)


def test_a_policy_is_a_setting_like_others(tmp_path: Path) -> None:
    (tmp_path / "patcher.toml").write_text("[tripwires]\nbanned = ['\\bexec\\b']\n")
    found = resolve(environ={}, folder=tmp_path)
    assert found.tripwires.for_op("rope") == TripwirePolicy(banned=(r"\bexec\b",))
    assert found.origins["tripwires"] == "patcher.toml"
    assert levers.TripwireSettings.model_validate(found.for_run()["tripwires"]) == found.tripwires
    environ = {"PATCHER_TRIPWIRES": '{"required": ["tl[.]dot"]}'}
    found = resolve(environ=environ, folder=tmp_path)
    assert found.tripwires.for_op("rope") == TripwirePolicy(required=("tl[.]dot",))
    with pytest.raises(UsageError, match="PATCHER_TRIPWIRES"):
        resolve(environ={"PATCHER_TRIPWIRES": "banned"}, folder=tmp_path)


HOSTILE = (
    *("'\\", '"\\', '"""a', "'", "'\"", "#", "/*", 'R"(', 'R"abcdefgh(', "1'", "1e", " ", "\\ "),
    *(
        "\\\n",
        "(",
        "f'{",
        "f''",
        ".",
        "uuR",
        "\ufdfa",
        "\n",
        "''\n",
        "a ",
        "a.",
        "a,",
        "a[",
        "a = ",
    ),
)


def test_hostile_text_costs_linear_time() -> None:
    size, worst = 1 << 17, 0.0
    for unit in HOSTILE:
        for language in (Language.CPP, Language.TORCH):
            begin = time.process_time()
            views((unit * size)[:size], language)
            worst = max(worst, time.process_time() - begin)
    # it takes 0.2 s; quadratic, it would be minutes
    assert worst < 3


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_takes_linear_time(rule: TripwireRule) -> None:
    units = [*HOSTILE, *rule.hits, *(hit[:-1] for hit in rule.hits)]
    size, worst = 1 << 16, 0.0
    for unit in units:
        text = (unit * size)[:size]
        begin = time.process_time()
        for _ in rule.regex.finditer(text):
            pass
        worst = max(worst, time.process_time() - begin)
    # it takes 0.05 s; quadratic, it would be a minute
    assert worst < 2


def test_a_long_source_is_said_to_be_long() -> None:
    found = seen("\n" * LONGEST + "std::thread x;")
    assert found.evidence == 1
    assert found.as_text() == (
        f"long (evidence): only {LONGEST:,} characters of it were looked at",
    )
    assert seen("\n" * LONGEST + "x", policy=TripwirePolicy(banned=("x",))).refused


def test_the_cheats_that_a_source_gives_away() -> None:
    levels: dict[str, list[str]] = {"evidence": [], "note": [], "nothing": []}
    for name, found in corpus("cheats"):
        level = "evidence" if found.evidence else "note" if found.hits else "nothing"
        levels[level].append(name)
        assert not found.refused
    for level, names in levels.items():
        print(f"{level}: {len(names)}", *(names if level != "evidence" else ()), sep="\n  ")
    assert len(levels["evidence"]) >= NOTICED["evidence"]
    assert len(levels["evidence"]) + len(levels["note"]) >= sum(NOTICED.values())


def test_the_honest_are_never_refused() -> None:
    found = dict(corpus("honest"))
    assert len(found) >= 60
    assert not [name for name, tripwires in found.items() if tripwires.refused]
    longer = [name for name, tripwires in found.items() if tripwires.evidence]
    assert len(longer) <= len(found) // 3, longer


def test_what_is_shipped_and_written_by_hand_needs_no_more_evidence() -> None:
    for info, candidate in load_op("fused_add_rms_norm").solutions():
        if info.origin == "hand":
            assert not look(candidate, True).evidence, look(candidate, True).as_text()


def test_views_are_named_by_rules() -> None:
    assert {rule.where for rule in rules()} <= set(Views.__dataclass_fields__)
