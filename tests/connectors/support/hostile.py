"""Requests of a client that means harm, by seed: hints that are malformed, huge, unknown or about others."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

REQUESTS = 1000
VICTIM = {"pin": "the-victims", "session": "the victim's session"}
OUTCOMES = {"accepted", "clipped", "deferred", "rejected", "ignored"}
_KINDS = [
    "kv.retain",
    "kv.pin",
    "kv.release",
    "kv.prefetch",
    "kv.demote",
    "vllm.set_priority",
    "kv.explode",
    "",
    None,
    7,
]
_VALUES = [
    None, True, -1, 0, 1, 1e308, float("nan"), float("inf"), "", [], {}, [[[[[]]]]], {"a": {"b": [1] * 50}},
    "5m", "-5m", "nan", *VICTIM.values(),
]  # fmt: skip
_UNCARRIED = [10**30, -(10**400), "\ud800"]
"""Engines fail with these on the way from their server to their scheduler, whatever they are for."""
_VERY = [*_UNCARRIED, "x" * 5000]
_NAMES = ["name", "session_id", "ttl_seconds", "directives", "start", "end", "priority", "duration", "value", "x"]
_BESIDE = ["agent_hint", "cache_control", "kv_cache_retention_config", "prompt_cache_key", "prompt_cache_retention"]


def parameters(seed: int) -> dict[str, Any]:
    """The parameters of one request, as they lie beside `kvtier`."""
    rng = random.Random(seed)
    out = dict[str, Any]()
    values = [*_VALUES, *_VERY] if rng.random() < 0.08 else _VALUES
    for name in rng.sample(_BESIDE, rng.choice([0, 0, 0, 0, 1, 2])):
        out[name] = rng.choice(values)
    if rng.random() < 0.1:
        out["kvtier"] = rng.choice([*values, {"pin": {"name": VICTIM["pin"], "ttl": rng.choice(values)}}])
    roll = rng.random()
    if roll < 0.1:
        out["kv_hints"] = rng.choice(values)
    else:
        actions = [_action(rng, number, values) for number in range(rng.choice([1, 2, 3, 16, 17, 60]))]
        out["kv_hints"] = {"protocol_version": "1.0", "message_id": str(seed), "actions": actions}
    return out


def _action(rng: random.Random, number: int, values: list[Any]) -> Any:
    roll = rng.random()
    if roll < 0.05:
        return rng.choice(values)
    kind = rng.choice(_KINDS)
    payload: dict[str, Any] = {name: rng.choice(values) for name in rng.sample(_NAMES, rng.randrange(4))}
    if roll < 0.6:  # well formed, but greedy, or about the victim's
        far = rng.choice([60, 1e6, 1e12])
        payload = {
            "kv.retain": {"directives": [{"start": 0, "end": 1 << 30, "priority": 100, "duration": far}]},
            "kv.pin": {"name": rng.choice([VICTIM["pin"], f"pin-{rng.randrange(500)}"]), "ttl_seconds": far},
            "kv.release": rng.choice([{}, {"name": VICTIM["pin"]}, {"session_id": VICTIM["session"]}]),
            "kv.prefetch": {"session_id": VICTIM["session"]},
            "kv.demote": {"session_id": VICTIM["session"]},
        }.get(str(kind), payload)
    return {"action_id": str(number), "action_type": kind, "action_version": "1.0", "payload": payload}


def is_carried(asked: Any) -> bool:
    """Whether an engine's server can hand these parameters on."""
    if isinstance(asked, dict):
        return all(map(is_carried, asked.values()))
    if isinstance(asked, list):
        return all(map(is_carried, asked))
    return not any(type(asked) is type(value) and asked == value for value in _UNCARRIED)


def is_answered_in_full(asked: dict[str, Any]) -> bool:
    """Whether these parameters are of a kind that each action must be answered by its id: an envelope that can be read,
    beside nothing that has the whole request uncached."""
    envelope = asked["kv_hints"]
    if set(asked) != {"kv_hints"} or not isinstance(envelope, dict) or not is_carried(asked):
        return False
    well_formed = all(isinstance(action, dict) and "action_id" in action for action in envelope.get("actions", [0]))
    return well_formed and "x" * 5000 not in json.dumps(asked)


def check_answer(asked: dict[str, Any], answers: list[dict[str, Any]]) -> int:
    """Every answer has an outcome, and each of the first 16 actions an answer. Returns how many there are."""
    assert {one["outcome"] for one in answers} <= OUTCOMES, answers
    assert all(one["outcome"] == "accepted" or one["why"] for one in answers), answers
    if is_answered_in_full(asked):
        actions = asked["kv_hints"]["actions"]
        told = {one["action"] for one in answers}
        assert {action["action_id"] for action in actions[:16]} <= told, (asked, answers)
    return len(answers)


def prompts(seed: int, shared: list[int], length: int) -> list[int]:
    """A prompt of its own, with the victim's beginning in one of three."""
    rng = random.Random(seed)
    own = [rng.randrange(3, 900) for _ in range(length)]
    return [*shared[: length // 2], *own[length // 2 :]] if seed % 3 == 0 else own


def seeds() -> Iterator[int]:
    yield from range(REQUESTS)
