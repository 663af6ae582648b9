"""What memory may keep of a text that a model, a compiler or a kernel wrote: words of a closed
list.

Candidates, prompts and replies hold what belongs to their owner. So nothing is kept that is not in
`words.txt`, in a shipped prompt or in `patterns.toml`, and no run of words that a source has, too.
Names, strings, secrets and lines of code cannot pass, whoever put them there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib import resources

LONGEST = 160
"""Characters of a phrase."""
KNOWN_SHARE = 0.6
"""Of a phrase's words that must be on the list; with fewer, it says nothing without the rest."""
REPEATED = 6
"""Words in a row that a phrase may not share with a source, comments included."""
_LEFT_OUT = "..."
_TOKEN = re.compile(r"[A-Za-z_][\w]*(?:(?:\.|::|-)\w+)*|\d[\w.]*|[,;:()]")
_WORD = re.compile(r"[a-z]+|\d+")
_LETTERS = ("a", "K", "k", "n")
_NUMBERS = {
    *map(str, range(65)),
    *(str(1 << power) for power in range(17)),
    "96",
    "100",
    "192",
    "384",
    "768",
    "1000",
}


def phrase(text: str, sources: Iterable[str]) -> str | None:
    """The text in words of the list, at most `LONGEST` characters on one line.

    None where too few of its words are known, or where it repeats one of the sources.
    """
    kept: list[str] = []
    known = unknown = 0
    for token in _TOKEN.findall(text[: 20 * LONGEST].replace("'s", "")):
        if not (token[0].isalnum() or token[0] == "_"):
            if kept and kept[-1] != token:
                kept.append(token)
            continue
        word = _public(token)
        known, unknown = known + (word is not None), unknown + (word is None)
        if word is not None:
            kept.append(word)
        elif not kept or kept[-1] != _LEFT_OUT:
            kept.append(_LEFT_OUT)
        if sum(map(len, kept)) + len(kept) > LONGEST:
            kept.pop()
            break
    if known < 2 or known < KNOWN_SHARE * (known + unknown):
        return None
    found = _spaced(kept)
    return None if any(repeats(found, source) for source in sources) else found


def repeats(text: str, source: str) -> bool:
    """Whether `REPEATED` words in a row of the text are in the source, too."""
    words, within = _WORD.findall(text.lower()), f" {' '.join(_WORD.findall(source.lower()))} "
    runs = (words[at : at + REPEATED] for at in range(len(words) - REPEATED + 1))
    return any(f" {' '.join(run)} " in within for run in runs)


def significant(text: str) -> frozenset[str]:
    """The words by which two phrases are told apart."""
    return frozenset(word for word in _WORD.findall(text.lower()) if len(word) > 3)


@cache
def vocabulary() -> dict[str, str]:
    """Every word that may be kept, by its lower-case form."""
    folder = resources.files("patcher")
    texts = [folder.joinpath("memory", "patterns.toml").read_text("utf-8")]
    prompts = folder.joinpath("prompting", "templates").iterdir()
    texts += [file.read_text("utf-8") for file in prompts if file.name.endswith(".j2")]
    words = [word for text in texts for word in _TOKEN.findall(text)]
    found = {word.lower(): word if word[1:].lower() != word[1:] else word.lower() for word in words}
    listed = folder.joinpath("memory", "words.txt").read_text("utf-8")
    lines = [line for line in listed.splitlines() if not line.startswith("#")]
    return found | {word.lower(): word for line in lines for word in line.split()}


def _public(token: str) -> str | None:
    if token[0].isdigit():
        return token if token in _NUMBERS else None
    if len(token) == 1 and token not in _LETTERS:
        return None  # else a word could be spelt
    if (word := vocabulary().get(token.lower())) is not None:
        return word
    if token.isalpha() and any(stem in vocabulary() for stem in _stems(token.lower())):
        return token.lower()
    parts = token.split("-")
    if len(parts) > 1 and all(part and _public(part) for part in parts):
        return token.lower()
    return None


def _stems(word: str) -> Iterable[str]:
    """What an English word may be a form of."""
    for ending in ("s", "es", "d", "ed", "ing", "ly", "er", "r"):
        stem = word.removesuffix(ending)
        if stem != word and len(stem) > 2:
            yield stem
            yield stem + "e"
            if stem[-1] == stem[-2]:
                yield stem[:-1]


def _spaced(tokens: list[str]) -> str:
    text = " ".join(tokens)
    text = re.sub(r" ([,;:)])", r"\1", text).replace("( ", "(")
    text = re.sub(r"\( ?\)", "", text)
    return re.sub(r" +", " ", text).strip(" ,;:(")
