"""A person's word on a patch, beside the rule's."""

from __future__ import annotations

from typing import Literal

from patcher.bench import SCHEMA_VERSION, Record
from patcher.bench.stats.comparison import Verdict

HumanWord = Literal["accept", "reject"]


class HumanVerdict(Record):
    """What a person said, and what the rule had said then."""

    schema_version: int = SCHEMA_VERSION
    time: str
    """ISO 8601, UTC."""
    word: HumanWord
    reason: str | None
    by: str | None
    """As that person wants to be named; nothing is taken from the machine."""
    rule: Verdict | None
    """None: no rule had decided."""
    patch_id: str | None
    digest: str | None
    """Of the patch bundle that was meant."""

    @property
    def overrules(self) -> bool:
        return self.rule is not None and self.word != self.rule

    @property
    def told(self) -> str:
        """In a sentence."""
        who = self.by or "a person"
        rule = f"the rule said {self.rule}" if self.rule else "no rule had decided"
        if self.overrules:
            rule += ", which stands in the record"
        why = f": {self.reason}" if self.reason else ""
        return f"{who} said {self.word}{why} ({rule})"
