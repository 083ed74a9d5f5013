"""The `kvtier` parameter of requests, and their scopes."""

from __future__ import annotations

import logging

import pytest

import kvtier
from kvtier.connectors.control import _KEYS, Control, Controls, PinRequest, Scopes
from kvtier.retention.hints import KEYS
from kvtier.retention.terms import BUILTIN, Depth


def make_config(**more: object) -> kvtier.Config:
    return kvtier.Config.parse({"tiers": {"g2": {"capacity": "1MiB"}}, **more})


def test_a_request_asks_for_less_than_the_default() -> None:
    controls = Controls(make_config())
    assert controls.parse(None) == Control(BUILTIN["24h"])
    asked = controls.parse({"retention": "1h", "ceiling": "g2", "load": False})
    assert (asked.terms.ttl, asked.terms.ceiling, asked.load, asked.store) == (3600, Depth.G2, False, True)
    assert controls.parse({"retention": "in_memory", "ceiling": "g4"}).terms.ceiling is Depth.G2


def test_a_request_asks_for_its_parts_a_pin_and_a_comparison() -> None:
    controls = Controls(make_config())
    asked = controls.parse({"retention": "5m", "ranges": [[0, 64, "24h"]], "ceiling": "g3",
                            "pin": {"name": "docs/manual", "ttl": "2h"}, "compared_with": "req-1"})  # fmt: skip
    terms = asked.chain_terms(block_tokens=16)
    assert [(t.terms.ttl, t.terms.ceiling) for _, _, t in terms.spans(3, 5)] == [(86400, 3), (300, 3)]
    assert (asked.pin, asked.compared_with) == (PinRequest("docs/manual", 7200.0), "req-1")
    alone = controls.parse({"ranges": [[0, 64, "in_memory"]]})
    scopes = Scopes(make_config())
    assert scopes.of("a", b"", alone.request) == scopes.of("a", b"", BUILTIN["in_memory"])


@pytest.mark.parametrize(
    "raw",
    [
        "1h",
        {"retention": "1 hour"},
        {"retention": 3},
        {"ceiling": "g5"},
        {"ttl": "1h"},
        {"load": 1},
        {"ranges": "24h"},
        {"ranges": [[5, 5, "24h"]]},
        {"ranges": [[0, 5, "a day"]]},
        {"ranges": [[0, 5, "in_memory"], [5, 9, "other"]]},
        {"pin": "manual"},
        {"pin": {"name": "manual", "ttl": 5}},
        {"compared_with": 7},
    ],
)
def test_a_request_that_cannot_be_understood_is_not_cached(raw: object, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        control = Controls(make_config()).parse(raw)
    assert (control.load, control.store) == (False, False)
    assert "a request is not cached" in caplog.text


CANARY = "tenant-canary-93"


@pytest.mark.parametrize(
    "raw",
    [
        CANARY,
        {CANARY: 1},
        *({key: wrong} for key in _KEYS for wrong in (CANARY, [CANARY], {CANARY: CANARY}, 64 * CANARY)),
        {"ranges": [[0, 5, CANARY]]},
        {"pin": {"name": "manual", "ttl": CANARY}},
        {"pin": {CANARY: CANARY}},
        *({"hints": {key: wrong}} for key in KEYS for wrong in (CANARY, [CANARY], {"type": CANARY}, {CANARY: 1})),
    ],
)
def test_the_log_repeats_nothing_that_a_client_wrote(raw: object, caplog: pytest.LogCaptureFixture) -> None:
    """A salt or a prompt in the wrong place."""
    with caplog.at_level(logging.DEBUG):
        Controls(make_config()).parse(raw)
    assert CANARY not in caplog.text


def test_a_mistyped_name_is_still_found_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Controls(make_config()).parse({"retenton": "24h"})
        Controls(make_config()).parse({"retention": "in-memory"})
    assert "did you mean retention?" in caplog.text and "did you mean in_memory?" in caplog.text


def test_scopes_part_salts_adapters_and_isolated_classes() -> None:
    scopes, day, alone = Scopes(make_config()), BUILTIN["24h"], BUILTIN["in_memory"]
    assert len({scopes.of(None, b"", day), scopes.of("a", b"", day), scopes.of("b", b"", day),
                scopes.of("a", b"x", day), scopes.of("a", b"", alone)}) == 5  # fmt: skip
    assert scopes.of("a", b"", day) == scopes.of("a", b"", BUILTIN["1h"])
    deny = Scopes(make_config(security={"salt": "deny"}))
    assert deny.of(None, b"", day) is None and deny.of("a", b"", day) is not None
