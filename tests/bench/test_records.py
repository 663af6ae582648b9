"""Helpers that read records: what a user wrote gives one clear error."""

from __future__ import annotations

import tomllib

import pytest
from pydantic import Field, ValidationError, field_validator

from patcher.bench import Record, parse_json, parse_toml, problem

DEEP = "[" * 50_000
LONG_NUMBER = "9" * 5_000


@pytest.mark.parametrize("value", [DEEP, LONG_NUMBER, "{"])
def test_what_cannot_be_parsed_is_a_value_error(value: str) -> None:
    with pytest.raises(ValueError, match=r"deep|digits|Expecting"):
        parse_json(value)
    with pytest.raises(tomllib.TOMLDecodeError):
        parse_toml(f"x = {value}")
    assert parse_json("[1]") == parse_toml("x = [1]")["x"] == [1]


class _Inner(Record):
    address: str

    @field_validator("address")
    @classmethod
    def _whole(cls, value: str) -> str:
        if "://" not in value:
            raise ValueError("must be a whole address")
        return value


class _Outer(Record):
    inner: tuple[_Inner, ...] = Field(min_length=1)


def test_a_problem_is_the_first_field_and_our_own_words() -> None:
    with pytest.raises(ValidationError) as caught:
        _Outer.model_validate({"inner": [{"address": "x"}], "more": 1})
    assert problem(caught.value) == "inner.0.address: must be a whole address"
    assert problem(OSError("gone")) == "gone"
