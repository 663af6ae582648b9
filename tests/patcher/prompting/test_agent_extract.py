"""Taking source and recommendations out of replies, whatever they look like."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from command_line import ROOT
from hypothesis import example, given
from hypothesis import strategies as st

from patcher.attempts import Diagnosis, Recommendation, ReplyFailure
from patcher.bench import Language
from patcher.kernel_search.recording import REPLIES, read
from patcher.kernel_search.recording_archive import recordings
from patcher.models.replay import RecordedReply, read_recording
from patcher.prompting.extract import (
    AS_WRITTEN,
    WHOLE_FILES,
    blocks,
    extract_json,
    extract_source,
    strict_schema,
    unusable,
)

SOURCE = "void norm(int a) {\n  return;\n}"
LANGUAGES = st.sampled_from(list(Language))


def failure_kind(text: str, language: Language = Language.CPP) -> str:
    found = extract_source(text, language, "norm")
    assert isinstance(found, ReplyFailure), found
    return found.kind


@pytest.mark.parametrize(
    "text",
    [
        f"```cpp\n{SOURCE}\n```",
        f"Thoughts.\n\n```C++\n{SOURCE}\n```\nMore.",
        f"```\n{SOURCE}\n```",
        f"```rust\n{SOURCE}\n```",  # the only block, whatever its tag
        f"~~~cpp\n{SOURCE}\n~~~",
        f"````cpp\n{SOURCE}\n````",
        f"   ```cpp title=norm.cpp\n{SOURCE}\n   ```",
        f"```cpp\r\n{SOURCE}\r\n```\r\n",
        f"First try:\n```cpp\nvoid norm();\n```\nBetter:\n```cpp\n{SOURCE}\n```\n",
        f"```cpp\n{SOURCE}\n```\nCompile with:\n```bash\ng++ x.cpp\n```",
        f"```cpp\n{SOURCE}\n```\nCalled as:\n```cpp\nint main() {{}}\n```",
        f"<think>\n```cpp\nvoid norm(int\nNo.\n</think>\n\n```cpp\n{SOURCE}\n```",
        f"```cpp\nvoid norm(int\nNo.\n[/THINK]```cpp\n{SOURCE}\n```",
    ],
)
def test_finds_the_source(text: str) -> None:
    assert extract_source(text, Language.CPP, "norm") == SOURCE + "\n"


def test_failures_have_kinds() -> None:
    assert failure_kind("") == "no_source"
    assert failure_kind("only `inline` code, no block") == "no_source"
    assert failure_kind(f"<think>\n```cpp\n{SOURCE}\n```\n</think>\nDone.") == "no_source"
    assert failure_kind(f"```cpp\n{SOURCE}\n") == "unclosed"
    assert failure_kind(f"```cpp\n{SOURCE}\n```\n```cpp\nvoid no") == "unclosed"
    assert failure_kind("```cpp\n\n```") == "empty"
    assert failure_kind("```cpp\n// Op: norm: the form of a header.\n/* norm */\n```") == "empty"
    assert failure_kind('```python\n# Op: norm\n"""norm"""\n```', Language.TRITON) == "empty"
    assert failure_kind("```bash\nls\n```\n```text\nx\n```") == "ambiguous"


FILE = f"// Op: norm: x\n#include <cmath>\n{SOURCE}"
TRITON = "# Op: norm: x\nimport triton\n\ndef norm(a):\n    return '\\d'"


@pytest.mark.parametrize("end", ["", "\n```", "\n```\n"])
@pytest.mark.parametrize(
    ("language", "file"), [("cpp", FILE), ("cpp", f"{FILE}\n// an end"), ("triton", TRITON)]
)
def test_a_reply_that_is_the_file_itself(language: str, file: str, end: str) -> None:
    reply, of = f"<think>x</think>\n{file}{end}", Language(language)
    assert extract_source(reply, of, "norm", reading=WHOLE_FILES) == f"{file}\n"
    found = extract_source(reply, of, "norm")  # as earlier versions took it
    assert isinstance(found, ReplyFailure)
    assert extract_source(f"```\n{file}\n```", of, "norm", reading=WHOLE_FILES) == f"{file}\n"


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("cpp", "// Op: norm: x\n// It is done by norm(a) with {}"),
        ("cpp", f"Here is norm:\n{SOURCE}"),
        ("cpp", f"{FILE}\nIt is fast."),
        ("cpp", FILE.replace("norm", "other") + "// norm(int a)\n}"),
        ("cpp", f"{FILE}\n```\nThen:\n```cpp\n{SOURCE}"),
        ("cpp", FILE + "\n" + "// x\n" * 20_000 + "}"),
        ("triton", "# Op: norm: x\n# def norm(a): return a"),
        ("triton", f"This is norm:\n{TRITON}"),
        ("triton", TRITON.replace("def norm", "def other")),
        ("triton", "def norm(a):\n    return " + "(" * 9000 + ")" * 9000),
        ("triton", "def norm(a):\n    return \0a"),
    ],
)
def test_what_is_not_surely_a_file_is_none(language: str, text: str) -> None:
    found = extract_source(text, Language(language), "norm", reading=WHOLE_FILES)
    assert isinstance(found, ReplyFailure)
    assert found.kind in ("no_source", "unclosed")


def test_so_many_replies_of_a_small_model_are_files() -> None:
    """As docs/tutorials/local-model.md says of the loops that ship."""
    counted = Counter[tuple[bool, bool]]()
    for name in ("recordings", "kernelbench-local"):
        with recordings(ROOT / f"bench/results/loop/{name}.tar.xz") as folders:
            small = [each for each in folders if "-local" in each.name or "qwen" in each.name]
            for folder in small:
                language = read(folder).language
                for line in read_recording(folder / REPLIES):
                    if line.role == "generate":
                        counted[_is_source(line, language, 0), _is_source(line, language, 2)] += 1
    assert counted == {(True, True): 69, (False, False): 28, (False, True): 13}


def _is_source(line: RecordedReply, language: Language, reading: int) -> bool:
    entry = line.step.partition("/")[0]
    found = unusable(line.reply) or extract_source(
        line.reply.text, language, entry, reading=reading
    )
    return isinstance(found, str)


def test_thinking_is_read_where_it_was_read_before() -> None:
    reply = f"```cpp\n{SOURCE}\n```\n</think>"
    assert extract_source(reply, Language.CPP, "norm", reading=AS_WRITTEN) == SOURCE + "\n"


def test_cuda_may_be_tagged_cpp() -> None:
    assert extract_source(f"```cpp\n{SOURCE}\n```", Language.CUDA, "norm") == SOURCE + "\n"


@given(st.text(), LANGUAGES)
@example("```", Language.CPP)
@example("```\n```", Language.CPP)
@example("~~~```\n`````", Language.TORCH)
def test_any_text_gives_a_source_or_a_failure(text: str, language: Language) -> None:
    found = extract_source(text, language, "norm")
    if isinstance(found, str):
        assert found.strip()
    else:
        assert found.detail


@given(
    st.lists(
        st.sampled_from(["```", "```cpp", "~~~", "````", "x = 1", "", "```python", "`", "norm"])
    ),
    LANGUAGES,
)
def test_any_fences_give_a_source_or_a_failure(lines: list[str], language: Language) -> None:
    text = "\n".join(lines)
    found = extract_source(text, language, "norm")
    if isinstance(found, str):
        assert any(found.strip() == block.source.strip() and block.closed for block in blocks(text))
        assert blocks(text)[-1].closed


PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="\r`~"))


@given(source=PLAIN, before=PLAIN, after=PLAIN, language=LANGUAGES)
def test_what_was_fenced_comes_out(
    source: str, before: str, after: str, language: Language
) -> None:
    code = f"norm\n{source}"
    text = f"{before}\n```{language.traits.tags[0]}\n{code}\n```\n{after}"
    assert extract_source(text, language, "norm") == code.rstrip() + "\n"


@given(
    st.text(alphabet='{}"change: ,[]1\\', max_size=60),
    st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=3),
)
def test_a_recommendation_is_found_among_anything(noise: str, rest: dict[str, object]) -> None:
    wanted = {**rest, "change": "unroll {it}"}
    found = extract_json(f"I think so.\n```json\n{json.dumps(wanted)}\n```", "change")
    assert found == wanted
    anything = extract_json(noise, "change")
    assert isinstance(anything, ReplyFailure) or "change" in anything


def test_the_last_recommendation_counts_and_depth_is_no_harm() -> None:
    text = 'Like {"change": "example"}. So: {"change": "this", "more": {"a": 1}} and {"b": 2}.'
    assert extract_json(text, "change") == {"change": "this", "more": {"a": 1}}
    assert isinstance(extract_json('{"a":' * 100_000, "change"), ReplyFailure)


def test_the_schema_of_advice_asks_for_every_field_and_no_other() -> None:
    assert strict_schema(Recommendation) == {
        "type": "object",
        "properties": {
            "bottleneck": {"type": "string"},
            "change": {"type": "string"},
            "expected_speedup": {"type": ["number", "null"]},
        },
        "required": ["bottleneck", "change", "expected_speedup"],
        "additionalProperties": False,
    }
    assert strict_schema(Diagnosis)["required"] == [
        *("critical_issue", "why_it_matters", "minimal_fix"),
    ]
