"""The page of models, roles and engines is what small models and the committed runs say."""

from __future__ import annotations

from model_matrix import PAGE, page


def test_the_page_is_what_was_proven() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make models`"
