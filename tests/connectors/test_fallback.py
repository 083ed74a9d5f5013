"""Errors of the cache as its engine sees them."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.connectors.fallback import falls_back_to, or_fallback


def divide(one: int, other: int = 1) -> float:
    return one / other


def test_an_error_becomes_the_default_answer_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert or_fallback(divide, 6, 3, fallback=0.0) == 2.0 and not caplog.records
    assert or_fallback(divide, 6, 0, fallback=0.5) == 0.5
    assert "divide failed" in caplog.text and "ZeroDivisionError" in caplog.text


def test_methods_fall_back_and_keep_their_names() -> None:
    class Engine:
        @falls_back_to((0, False))
        def match(self, request: Any, *, tokens: int) -> tuple[int | None, bool]:
            """Tokens."""
            return tokens // request, True

    assert Engine().match(2, tokens=8) == (4, True)
    assert Engine().match(0, tokens=8) == (0, False)
    assert (Engine.match.__name__, Engine.match.__doc__) == ("match", "Tokens.")


def test_an_engine_that_is_interrupted_stops() -> None:
    @falls_back_to(None)
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
