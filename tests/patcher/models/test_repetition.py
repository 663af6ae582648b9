"""Whether a text ends in a loop."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from patcher.models.repetition import LEAST_CHARACTERS, LEAST_TIMES, ends_in_a_loop

LINE = "  out[i] = in[i];\n"
NUMBERED = "".join(f"  case {n}: return {n};\n" for n in range(500))
BEFORE = "I begin.\n```cpp\nvoid f() {\n"


def test_loops_of_any_piece_are_seen() -> None:
    assert ends_in_a_loop(BEFORE + 100 * LINE)
    assert ends_in_a_loop(BEFORE + 100 * LINE + LINE[:9])  # cut off in a line
    assert ends_in_a_loop(BEFORE + 5 * NUMBERED[:1500])
    assert ends_in_a_loop("x" * 1000)


def test_what_goes_on_or_is_short_is_no_loop() -> None:
    assert not ends_in_a_loop("")
    assert not ends_in_a_loop(BEFORE + NUMBERED)
    assert not ends_in_a_loop(BEFORE + 3 * NUMBERED[:1500])
    assert not ends_in_a_loop(BEFORE + 10 * LINE)
    assert not ends_in_a_loop(100 * LINE + NUMBERED)
    assert not ends_in_a_loop(BEFORE + "}" + "\n" * 5000)


def slow(text: str) -> bool:
    """The definition itself."""
    for period in range(1, len(text) // LEAST_TIMES + 1):
        size = max(LEAST_CHARACTERS, LEAST_TIMES * period)
        end = text[-size:]
        if len(end) == size and end[period:] == end[:-period]:
            return True
    return False


@given(
    st.text("ab", max_size=30),
    st.text("ab", min_size=1, max_size=150),
    st.integers(1, 500),
    st.text("ab", max_size=3),
)
def test_it_is_as_defined(before: str, piece: str, times: int, after: str) -> None:
    text = (before + times * piece)[:3000] + after
    assert ends_in_a_loop(text) == slow(text)
