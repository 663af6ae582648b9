"""The header of a kernel: the comment at the top of its source that describes it.

Fields have one form in every language, `// Op: ...` or `# Op: ...`; further lines of a field are
indented by two spaces. A generated kernel has `FIELDS`. A kernel of the library also has
`PROVENANCE`. Its last field, `Digest`, is `Candidate.digest` of the source after it and an empty
line: the source that was judged, which recordings, verdicts and bundles refer to by that digest.
"""

from __future__ import annotations

import re

from patcher.bench.ops.contract import Contract

FIELDS = ("Op", "Arguments", "Writes", "Needs", "Idea")
"""Fields that the author writes: the contract in one sentence, the arguments with their dtypes and
shapes, which of them are written, hardware and guards, and why it is fast."""

PROVENANCE = ("Made by", "Figures", "Digest")
"""Fields added later: who or which run made it, its measurements, and the digest of the source."""

_FIELD = re.compile(rf"({'|'.join(FIELDS + PROVENANCE)}): ?(.*)")
_DIGEST = re.compile("Digest: ([0-9a-f]{64})")
_WIDTH = 100


def comment_mark(in_python: bool) -> str:
    """Prefix of a header's lines."""
    return "#" if in_python else "//"


def read_header(source: str, mark: str) -> dict[str, str]:
    """The fields of the comment at the top of a source, in order, with blanks collapsed.

    Args:
        mark: `comment_mark` of its language.

    Returns:
        The text of each field; empty if the source begins with anything else.
    """
    found: dict[str, str] = {}
    name = None
    for line in _comment(source, mark):
        if field := _FIELD.fullmatch(line):
            name = field[1]
            found[name] = field[2]
        elif name is not None and line.startswith("  "):
            found[name] += f" {line}"
        else:
            name = None
    return {name: " ".join(text.split()) for name, text in found.items()}


def missing_fields(source: str, mark: str) -> list[str]:
    """Fields of `FIELDS` that a source's header lacks or leaves empty."""
    found = read_header(source, mark)
    return [name for name in FIELDS if not found.get(name)]


def header_hint(source: str, mark: str) -> str | None:
    """A hint for a source that is packaged without a complete header, else None."""
    lacking = missing_fields(source, mark)
    if not lacking:
        return None
    return (
        f"hint: the source does not begin with a header that says {', '.join(lacking)}: put one at "
        "its top before it is shared"
    )


def split_header(source: str, mark: str) -> tuple[str, str] | None:
    """The digest that a header states, and the source after that line and an empty one.

    The caller must compare the two: if they match, nothing was changed since it was judged.
    """
    comment = _comment(source, mark)
    rest = source.split("\n")[len(comment) :]
    stated = _DIGEST.fullmatch(comment[-1]) if comment else None
    if stated is None or len(rest) < 2 or rest[0]:
        return None
    return stated[1], "\n".join(rest[1:])


def header_form(contract: Contract, mark: str) -> str:
    """A header with the contract's fields filled in, for the author of a kernel."""
    texts = {
        "Op": f"{contract.name}: what it computes, as a formula or one sentence.",
        "Arguments": arguments(contract),
        "Writes": ", ".join(written(contract)),
        "Needs": "the hardware and the shapes, dtypes and alignment it is for; what others get.",
        "Idea": "how the work is split, where data is kept, why that is fast; whose idea.",
    }
    return "\n".join(line for name in FIELDS for line in wrapped(name, texts[name], mark))


def arguments(contract: Contract) -> str:
    """`x[T: tokens, inner], ..., epsilon; T: bfloat16 or float16` of a contract."""
    tensors = [
        f"{tensor.name}[{tensor.dtype}: {', '.join(tensor.shape)}]" for tensor in contract.tensors
    ]
    dtypes = [
        f"{symbol}: {' or '.join(name.lstrip('=') for name in names)}"
        for symbol, names in contract.dtypes.items()
    ]
    return "; ".join([", ".join([*tensors, *(one.name for one in contract.scalars)]), *dtypes])


def written(contract: Contract) -> list[str]:
    """The tensors that a call writes, in the contract's order."""
    return [tensor.name for tensor in contract.tensors if tensor.access != "read"]


def wrapped(name: str, text: str, mark: str) -> list[str]:
    """The lines of one field."""
    lines = [f"{mark} {name}:"]
    for word in text.split():
        if len(lines[-1]) + 1 + len(word) > _WIDTH:
            lines.append(f"{mark}  ")
        lines[-1] += f" {word}"
    return lines


def _comment(source: str, mark: str) -> list[str]:
    """The lines of the comment that a source begins with, without their marks."""
    found = []
    for line in source.split("\n"):
        if line != mark and not line.startswith(f"{mark} "):
            break
        found.append(line[len(mark) + 1 :])
    return found
