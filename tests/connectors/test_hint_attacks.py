"""Parameters of requests that are made to do harm: too many, too large, too deep, and of wrong kinds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from kvtier.config import Config
from kvtier.connectors.control import Controls
from kvtier.identity.keys import scope_of
from kvtier.retention.hints import ACTIONS_MAX, read_hints

CONTROLS = Controls(Config.parse({"tiers": {"g2": {"capacity": "64MiB"}}}))
HUGE = 10**5000


def action(identity: object = "a", kind: object = "kv.pin", **payload: Any) -> dict[str, Any]:
    return {"action_id": identity, "action_type": kind, "action_version": "1.0", "payload": payload}


def envelope(*actions: object) -> dict[str, Any]:
    return {"kv_hints": {"protocol_version": "1.0", "message_id": "m", "actions": list(actions)}}


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


WRONG: dict[str, dict[str, Any]] = {
    "a huge number as a name": envelope(action(HUGE)),
    "a nested name": envelope(action(nested(3000))),
    "a nested kind": envelope(action("a", nested(3000))),
    "a huge version": {"agent_hint": {"schema_version": HUGE}},
    "half a surrogate pair": envelope(action("\ud800", name="x", ttl_seconds=1)),
}


@pytest.mark.parametrize("raw", WRONG.values(), ids=list(WRONG))
def test_no_hint_raises(raw: dict[str, Any]) -> None:
    CONTROLS.parse({"hints": raw})
    read_hints(raw)


@pytest.mark.parametrize("depth", [1, 300, 3000])
def test_no_parameter_raises(depth: int) -> None:
    for value in (HUGE, -HUGE, float("nan"), "\ud800", nested(depth), {"": nested(depth)}, True, b"", {1: 2}):
        for key in ("ceiling", "compared_with", "hints", "load", "pin", "ranges", "retention", "session", "store"):
            CONTROLS.parse({key: value})
        for ranges in ([value], [[value, value, value]], [[0, value, "1h"]], [[value, 1, "1h"]]):
            CONTROLS.parse({"ranges": ranges})
        CONTROLS.parse({"pin": {"name": value, "ttl": value}})


def test_a_salt_may_be_any_text() -> None:
    assert scope_of("\ud800") != scope_of("\ud801") != scope_of("?")


def test_answers_are_bounded_however_many_actions_there_are() -> None:
    hints = read_hints(envelope(*[{}] * 5000))
    assert len(hints.answers) == ACTIONS_MAX + 1 and "4984" in hints.answers[-1].why


class Counted(Mapping[str, Any]):
    """A mapping of a million keys that tells how many were looked at."""

    seen = 0

    def __getitem__(self, key: str) -> object:
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        for number in range(1_000_000):
            self.seen += 1
            yield f"key {number}"

    def __len__(self) -> int:
        return 1_000_000


@pytest.mark.parametrize("key", ["hints", "pin", "ranges", "load", "session", ""])
def test_a_large_mapping_is_refused_unread(key: str) -> None:
    large = Counted()
    control = CONTROLS.parse({key: large} if key else large)
    assert large.seen <= 1 and (key == "hints" or not control.store)


@pytest.mark.parametrize("raw", [
    {"hints": {"kv_hints": Counted()}},
    {"hints": {"cache_control": [{}] * 10_000}},
    {"hints": envelope(action(payload=dict.fromkeys(map(str, range(10_000)))))},
    {"ranges": [[0, 16, "1h"]] * 10_000},
    {"retention": "x" * 10_000_000},
    {"hints": {"prompt_cache_retention": "x" * 10_000_000}},
])  # fmt: skip
def test_too_much_is_a_fault_that_names_the_field(raw: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    control = CONTROLS.parse(raw)
    assert not control.load and not control.store, "its sender may have asked for less than the default stores"
    assert len(caplog.text) < 500 and f"kvtier.{next(iter(raw))}" in caplog.text
