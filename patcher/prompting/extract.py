"""Take the source, or the recommendation, out of a model's reply; what is not there is a value, not
an error."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

from pydantic import JsonValue

from patcher.attempts import ReplyFailure
from patcher.bench import Language, Record
from patcher.bench.judge.stripping import views
from patcher.models import Reply
from patcher.models.repetition import ends_in_a_loop

_FENCE = re.compile(r"[ \t]{0,3}(`{3,}|~{3,})[ \t]*([\w+#.-]*)([^`\n]*)")
_THOUGHT_ENDS = ("</think>", "</thinking>", "[/THINK]")
"""What some models write after their thinking, where the server does not put it apart."""
_LONGEST_REPLY = 1_000_000
"""Characters; what is longer is not looked at: the longest room has about half as many."""
_LONGEST_FENCE = 200
"""A longer line begins or ends no block: the pattern takes the square of its length."""
_MAX_BRACES = 500
_LONGEST_ADVICE = 100_000
"""Characters of a reply that is to hold one short JSON object."""
AS_WRITTEN, ANSWERS, WHOLE_FILES = 0, 1, 2
"""How replies are read: with the thinking in them; without; also those that are a source file and
no fenced block. The judge says of either what it is worth."""
LONGEST_SOURCE = 60_000
"""Characters of a source, unless a prompt has less room; kernels have some thousands."""


class CodeBlock(Record):
    """One fenced block."""

    tag: str
    source: str
    closed: bool


def blocks(text: str) -> list[CodeBlock]:
    """Every fenced block of a Markdown text, in order; the last one may be unclosed."""
    found: list[CodeBlock] = []
    fence, tag = "", ""
    lines: list[str] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        match = _FENCE.fullmatch(line) if len(line) <= _LONGEST_FENCE else None
        if not fence:
            if match:
                fence, tag, lines = match[1], match[2].lower(), []
        elif match and match[1].startswith(fence) and not match[2] and not match[3].strip():
            found.append(CodeBlock(tag=tag, source="\n".join(lines), closed=True))
            fence = ""
        else:
            lines.append(line)
    if fence:
        found.append(CodeBlock(tag=tag, source="\n".join(lines), closed=False))
    return found


def answer(text: str) -> str:
    """A reply without the thinking before it, whose drafts are no answer."""
    for mark in _THOUGHT_ENDS:
        text = text.rpartition(mark)[2]
    return text


def unusable(reply: Reply) -> ReplyFailure | None:
    """Why the reply as a whole must not be parsed, if so."""
    if reply.truncated and ends_in_a_loop(reply.text):
        detail = "it repeated one piece again and again until it was cut off; write each line once"
        return ReplyFailure(kind="repeated", detail=detail)
    if reply.truncated:
        return ReplyFailure(kind="truncated", detail="the reply was cut off before its end")
    if reply.stop_reason == "refusal":
        return ReplyFailure(kind="refused", detail="the model declined to answer")
    if reply.stop_reason == "pause_turn":
        return ReplyFailure(kind="truncated", detail="the reply paused before its end")
    if reply.stop_reason == "too_long":
        return ReplyFailure(kind="too_long", detail="the reply is too long")
    return None


def whole_file(text: str, language: Language, entry: str) -> str | None:
    """A reply that is a source file from its first line to its last, but for the line of a fence at
    its end; None where that is not sure."""
    lines = text.strip().split("\n")
    if len(lines) > 1 and re.fullmatch(r"[ \t]{0,3}`{3,}\s*", lines[-1]):
        del lines[-1]
    source = "\n".join(lines).rstrip()
    if len(source) > LONGEST_SOURCE or blocks(source):
        return None
    if language.traits.in_python:
        try:
            with warnings.catch_warnings(action="ignore"):
                defined = ast.parse(source).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        names = [one.name for one in defined if isinstance(one, ast.FunctionDef)]
        return source if entry in names else None
    code = views(source, language).code
    ends = source.startswith(("//", "/*", "#include", "#pragma")) and code.rstrip().endswith("}")
    return source if ends and re.search(rf"\b{re.escape(entry)} ?\(", code) else None


def extract_source(
    text: str,
    language: Language,
    entry: str,
    longest: int = LONGEST_SOURCE,
    *,
    reading: int = ANSWERS,
) -> str | ReplyFailure:
    """The source in a reply: the last block of the language that names the entry, or else the only
    block.

    Args:
        longest: characters that the source may have; a later prompt must have room for it.
        reading: `AS_WRITTEN`, `ANSWERS` or `WHOLE_FILES`.
    """
    if len(text) > _LONGEST_REPLY:
        return ReplyFailure(kind="too_long", detail="the reply is too long")
    if reading > AS_WRITTEN:
        text = answer(text)
    found, tag = blocks(text), language.traits.tags[0]
    closed = bool(found) and found[-1].closed
    if reading >= WHOLE_FILES and not closed and (source := whole_file(text, language, entry)):
        found = [CodeBlock(tag=tag, source=source, closed=True)]
    if not found:
        detail = "the reply holds no fenced code block"
        if reading >= WHOLE_FILES:
            detail += f": before the file's first line write ```{tag}, after its last ```"
        return ReplyFailure(kind="no_source", detail=detail)
    if not found[-1].closed:
        detail = f"its last code block is not closed; begin it with ```{tag}, end it with ```"
        return ReplyFailure(kind="unclosed", detail=detail)
    fitting = [block for block in found if block.tag in language.traits.tags]
    named = [block for block in fitting if re.search(rf"\b{re.escape(entry)}\b", block.source)]
    if named or fitting:
        chosen = (named or fitting)[-1]
    elif len(found) == 1:
        chosen = found[0]
    else:
        return ReplyFailure(
            kind="ambiguous",
            detail=f"{len(found)} code blocks, none tagged {tag}; give one block with that tag",
        )
    if not chosen.source.strip():
        return ReplyFailure(kind="empty", detail="the code block is empty")
    if not views(chosen.source, language).text.strip():
        detail = "the code block holds a comment and no code; give the whole source file"
        return ReplyFailure(kind="empty", detail=detail)
    source = chosen.source.rstrip() + "\n"
    if len(source) > longest:
        detail = f"the source is too long: {len(source):,} characters; at most {longest:,} may be"
        return ReplyFailure(kind="too_long", detail=detail)
    return source


def extract_json(text: str, key: str) -> dict[str, Any] | ReplyFailure:
    """The last JSON object in a reply that has this key."""
    if len(text) > _LONGEST_ADVICE:
        return ReplyFailure(kind="too_long", detail="the reply is too long")
    text, decoder = answer(text), json.JSONDecoder()
    chosen: dict[str, Any] | None = None
    at, tried = text.find("{"), 0
    while at >= 0 and tried < _MAX_BRACES:
        tried += 1
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            if isinstance(value, dict) and key in value:
                chosen = value
        at = text.find("{", end)
    if chosen is None:
        return ReplyFailure(kind="no_json", detail=f'the reply holds no JSON object with "{key}"')
    return chosen


def strict_schema(record: type[Record]) -> dict[str, JsonValue]:
    """The JSON schema of a record as both APIs take one for a reply: every field is required, no
    other is allowed, and nothing is said of lengths and ranges, which are checked afterwards.
    """
    properties: dict[str, JsonValue] = {}
    for name, said in record.model_json_schema()["properties"].items():
        kinds = [one["type"] for one in said.get("anyOf", [said])]
        properties[name] = {"type": kinds[0] if len(kinds) == 1 else kinds}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
