"""Hints of every dialect become the same few wishes; what cannot be understood is answered."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import InvalidRequest
from kvtier.retention.hints import (
    ACTIONS_MAX,
    DURATION_S_MAX,
    KEYS,
    NO_HINTS,
    Demote,
    HintAnswer,
    Keep,
    PinPrompt,
    Prefetch,
    Release,
    Verb,
    read_hints,
)


def envelope(*actions: tuple[str, dict[str, Any]], version: str = "1.0") -> dict[str, Any]:
    return {"kv_hints": {"protocol_version": "1.0", "message_id": "m", "actions": [
        {"action_id": f"a{place}", "action_type": kind, "action_version": version, "payload": payload}
        for place, (kind, payload) in enumerate(actions)
    ]}}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "payload", "verb"),
    [
        ("kv.retain", {"directives": [{"start": 0, "end": 64, "priority": 80, "duration": 60}]}, Keep(64, 60)),
        (
            "kv.retain",
            {"scope": "request", "directives": [{"end": 64, "priority": 90, "duration": 90},
                                                {"start": 64, "end": 96, "priority": 60, "duration": 60},
                                                {"start": 96, "end": 128, "priority": 50, "duration": 5}]},
            Keep(96, 60),
        ),
        ("kv.retain", {"directives": [{"covers_output": True, "priority": 80, "duration": 60}]}, Keep(None, 60)),
        ("vllm.set_priority", {"target": "request_cached", "value": 70, "ttl_seconds": 30}, Keep(None, 30)),
        ("kv.pin", {"name": "manual", "ttl_seconds": 30}, PinPrompt("manual", 30)),
        ("kv.release", {"name": "manual"}, Release(pin="manual")),
        ("kv.release", {"session_id": "s"}, Release(session="s")),
        ("kv.release", {}, Release()),
        ("kv.prefetch", {"session_id": "s"}, Prefetch("s")),
        ("kv.demote", {}, Demote()),
    ],
)  # fmt: skip
def test_each_action_of_kv_hints(kind: str, payload: dict[str, Any], verb: Verb) -> None:
    hints = read_hints(envelope((kind, payload)))
    assert [(action.id, action.kind, action.verb) for action in hints.actions] == [("a0", kind, verb)]
    assert not hints.answers


@pytest.mark.parametrize(
    ("kind", "payload", "outcome", "why"),
    [
        ("kv.share", {}, "ignored", "unknown"),
        ("kv.fetch", {"block_hashes": [1]}, "ignored", "unknown"),
        ("kv.retain", {"directives": [{"priority": 30, "duration": 60}]}, "ignored", "priority 50 and less"),
        ("vllm.set_priority", {"value": 50, "ttl_seconds": 3}, "ignored", "priority 50 and less"),
        ("kv.retain", {"directives": [{"priority": 101, "duration": 60}]}, "rejected", "<= 100"),
        ("kv.retain", {"directives": [{"priority": 80, "duration": -1}]}, "rejected", "> 0"),
        ("kv.retain", {"directives": [{"priority": 80, "duration": float("inf")}]}, "rejected", "duration"),
        ("kv.retain", {"directives": [{"start": 9, "end": 9, "priority": 80, "duration": 1}]}, "rejected", "empty"),
        (
            "kv.retain",
            {"directives": [{"end": 9, "priority": 60, "duration": 1}, {"end": 99, "priority": 61, "duration": 1}]},
            "rejected",
            "must not rise",
        ),
        ("kv.retain", {"directives": [{"priority": 80, "duration": 1}] * 129}, "rejected", "<= 128"),
        ("kv.retain", {}, "rejected", "directives"),
        ("kv.pin", {"name": 7, "ttl_seconds": 3}, "rejected", "name"),
        ("kv.prefetch", {}, "rejected", "session_id"),
    ],
)
def test_what_is_not_understood_is_answered(kind: str, payload: dict[str, Any], outcome: str, why: str) -> None:
    (answer,) = read_hints(envelope((kind, payload))).answers
    assert (answer.action, answer.kind, answer.outcome) == ("a0", kind, outcome) and why in answer.why


def test_one_bad_action_does_not_spoil_the_others() -> None:
    hints = read_hints(envelope(("kv.pin", {}), ("kv.demote", {}), ("kv.unheard_of", {})))
    assert [action.id for action in hints.actions] == ["a1"]
    assert [(answer.action, answer.outcome) for answer in hints.answers] == [("a0", "rejected"), ("a2", "ignored")]


def test_what_is_too_much_is_clipped_or_rejected() -> None:
    hints = read_hints(envelope(*[("kv.demote", {})] * (ACTIONS_MAX + 2)))
    assert len(hints.actions) == ACTIONS_MAX and {answer.outcome for answer in hints.answers} == {"rejected"}
    (kept,) = read_hints(envelope(("vllm.set_priority", {"value": 90, "ttl_seconds": 29 * 86_400}))).actions
    assert kept.verb == Keep(None, DURATION_S_MAX) and kept.clipped == "kept for 24 hours at most"
    (answer,) = read_hints(envelope(("kv.demote", {}), version="2.0")).answers
    assert answer.outcome == "ignored" and "version" in answer.why


def test_an_agents_hint() -> None:
    hints = read_hints({"agent_hint": {"schema_version": 1, "trajectory_id": "t", "kv_priority": 70, "lease_until": 5}})
    assert hints.session == "t" and hints.actions[0].verb == Keep(None, DURATION_S_MAX, 5.0)
    hints = read_hints({"agent_hint": {"trajectory_id": "t", "kv_priority": 20}})
    assert hints.session == "t" and hints.answers[0].outcome == "ignored" and not hints.actions
    assert read_hints({"agent_hint": "high"}).answers[0].outcome == "rejected"


def test_ranges_of_tensorrt_llm() -> None:
    ranges = [{"token_start": 0, "token_end": 32, "priority": 80, "duration_ms": 30_000},
              {"token_start": 32, "token_end": None, "priority": 35}, {"priority": 90}]  # fmt: skip
    hints = read_hints({"kv_cache_retention_config": {"token_range_retention_configs": ranges,
                                                      "decode_retention_priority": 35}})  # fmt: skip
    assert [action.verb for action in hints.actions] == [Keep(32, 30), Keep(None, DURATION_S_MAX)]
    assert hints.actions[1].clipped and hints.answers == (
        HintAnswer("kv_cache_retention_config[1]", "kv_cache_retention_config", "ignored", hints.answers[0].why),
    )


@pytest.mark.parametrize(
    ("raw", "retention", "ranges"),
    [
        ({"cache_control": {"type": "ephemeral"}}, "5m", ()),
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, "1h", ()),
        ({"cache_control": [{"ttl": "1h", "tokens": 512}, {"ttl": "5m"}]}, "5m", ((0, 512, "1h"),)),
        ({"cache_control": [{"ttl": "5m"}, {"ttl": "1h"}]}, "1h", ()),
        ({"prompt_cache_retention": "24h"}, "24h", ()),
        ({"prompt_cache_retention": "in_memory"}, "in_memory", ()),
        ({"prompt_cache_retention": "in-memory"}, "in_memory", ()),
    ],
)
def test_commercial_apis_name_classes(raw: dict[str, Any], retention: str, ranges: Any) -> None:
    hints = read_hints(raw)
    assert (hints.retention, hints.ranges) == (retention, ranges)


@pytest.mark.parametrize(
    "raw",
    [
        {"prompt_cache_retention": "none"},
        {"prompt_cache_retention": 5},
        {"cache_control": {"ttl": "2h"}},
        {"cache_control": [{}] * 5},
        {"cache_control": "ephemeral"},
    ],
)
def test_a_bound_on_storing_that_cannot_be_read_is_no_default(raw: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"^(prompt_cache_retention|cache_control)"):
        read_hints(raw)


def test_the_key_of_a_prompts_cache_is_its_session() -> None:
    assert read_hints({"prompt_cache_key": "user-7"}).session == "user-7"
    assert read_hints({"prompt_cache_key": 7}) == NO_HINTS == read_hints({})


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda some: st.lists(some, max_size=4) | st.dictionaries(st.text(max_size=9), some, max_size=4),
    max_leaves=12,
)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.dictionaries(st.sampled_from(KEYS), anything, max_size=6))
def test_nothing_that_a_sender_writes_is_an_error_of_ours(raw: dict[str, Any]) -> None:
    try:
        hints = read_hints(raw)
    except InvalidRequest:
        return
    assert json.dumps([answer.why for answer in hints.answers])


def test_an_agent_hint_of_another_version_is_ignored() -> None:
    hints = read_hints({"agent_hint": {"schema_version": "2.1", "kv_priority": 90, "lease_until": 5}})
    assert not hints.actions and [answer.outcome for answer in hints.answers] == ["ignored"]
    assert "version" in hints.answers[0].why
