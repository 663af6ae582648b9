"""Names that generated Python and C++ can hold."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping

_GLOBALS = (
    "torch aten number module float a dict zip tuple list isinstance RuntimeError OUTPUTS NUMBER "
    "in_numbers reference control self"
)
_RESERVED = frozenset(_GLOBALS.split())
"""Names that generated functions read beside their arguments; others there begin with `_`."""
_CPP_WORDS = (
    "auto bool char const default delete do double enum extern float goto int long namespace new "
    "operator private public register short signed sizeof static struct switch template this "
    "typedef typename union unsigned using virtual void volatile alignas alignof asm bitand bitor "
    "case catch char16_t char32_t compl concept constexpr const_cast decltype dynamic_cast "
    "explicit friend inline mutable noexcept nullptr reinterpret_cast requires "
    "static_assert static_cast thread_local throw typeid wchar_t xor NAN INFINITY NULL"
)
_CPP = frozenset(_CPP_WORDS.split())


def identifier(text: str, taken: set[str]) -> str:
    """A name in Python and C++ that nothing else has, added to `taken`."""
    name = re.sub(r"\W", "_", text, flags=re.ASCII).strip("_") or "value"
    if not name[0].isalpha():
        name = f"t_{name}"
    while name in taken or name in _RESERVED or keyword.iskeyword(name) or name in _CPP:
        name += "_"
    taken.add(name)
    return name


def replaced(text: str, names: Mapping[str, str]) -> str:
    """Arithmetic with other texts for its names, where there are such."""
    return re.sub(r"[A-Za-z_]\w*", lambda match: names.get(match[0], match[0]), text)
