"""Hints that come with a request: how its KV is going to be used. Read here, carried out elsewhere. Pure.

    kv_hints                      actions kv.retain, kv.pin, kv.release, kv.prefetch, kv.demote, vllm.set_priority
    agent_hint                    kv_priority and lease_until of a trajectory, which is its session
    kv_cache_retention_config     TensorRT-LLM's priorities and durations by token range
    cache_control                 Anthropic's breakpoints: {"type": "ephemeral", "ttl": "5m" or "1h"}
    prompt_cache_key              OpenAI's: the session
    prompt_cache_retention        OpenAI's: in_memory or 24h

A hint is a wish of somebody who is not trusted. One that cannot be understood is answered, and ignored. The exceptions
are those that limit how long data may be stored: their reader raises, since ignoring them would store too much.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from kvtier.errors import InvalidRequest
from kvtier.retention.terms import PRIORITY, PRIORITY_MAX
from kvtier.units import parse_duration, shorten

ACTIONS_MAX, DIRECTIVES_MAX = 16, 128
DURATION_S_MAX = 86_400.0
"""Longest time that a hint may ask blocks to be kept or pinned for; longer ones are clipped to it."""
KEYS = ("agent_hint", "cache_control", "kv_cache_retention_config", "kv_hints", "prompt_cache_key",
        "prompt_cache_retention")  # fmt: skip

SESSION_CHARS_MAX = 128

Outcome = Literal["accepted", "clipped", "deferred", "rejected", "ignored"]
Priority = Annotated[int, Meta(ge=0, le=PRIORITY_MAX)]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
Seconds = Annotated[float, Meta(gt=0, le=30 * 86_400.0)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Id = Annotated[str, Meta(max_length=256)]


@dataclass(frozen=True, slots=True)
class HintAnswer:
    """What became of one action, and why; "" where it was carried out as asked."""

    action: str
    kind: str
    outcome: Outcome
    why: str = ""


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep the leading `tokens` of the prompt (None: all) from being evicted, for `seconds` or until a wall time."""

    tokens: int | None
    seconds: float
    until: float | None = None


@dataclass(frozen=True, slots=True)
class PinPrompt:
    """Pin the prompt under this name."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Release:
    """End what hints of this tenant keep: the pin of this name, or all that was kept of a session (None: of this
    prompt)."""

    pin: str | None = None
    session: str | None = None


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Bring the blocks of a session into G2: it is about to go on."""

    session: str


@dataclass(frozen=True, slots=True)
class Demote:
    """Give up copies in G2 that a deeper tier has, of a session (None: of this prompt)."""

    session: str | None = None


Verb = Keep | PinPrompt | Release | Prefetch | Demote


@dataclass(frozen=True, slots=True)
class Action:
    """One wish. `clipped`: why less than asked is wished for already."""

    id: str
    kind: str
    verb: Verb
    clipped: str = ""


@dataclass(frozen=True, slots=True)
class Hints:
    """All of one request. `retention`: a class for the whole prompt, `ranges` for parts of it; `session`: its name."""

    actions: tuple[Action, ...] = ()
    answers: tuple[HintAnswer, ...] = ()
    retention: str = ""
    ranges: tuple[tuple[int, int, str], ...] = ()
    session: str = ""


NO_HINTS = Hints()


def read_hints(raw: Mapping[str, Any]) -> Hints:
    """The hints among a request's parameters, by KEYS. Raises InvalidRequest for the two that name a retention class,
    if they cannot be read."""
    actions, answers, session = list[Action](), list[HintAnswer](), ""
    for key, read in _READERS.items():
        if raw.get(key) is not None:
            found = _understood(key, key, lambda read=read, key=key: read(raw[key]))  # type: ignore[misc]
            if isinstance(found, HintAnswer):
                answers.append(found)
            else:
                more, said, named = found
                actions += more
                answers += said
                session = session or named
    retention, ranges = _classes(raw)
    session = session or _session(raw.get("prompt_cache_key"))
    return Hints(tuple(actions), tuple(answers), retention, ranges, session)


T = TypeVar("T")
Read = tuple[list[Action], list[HintAnswer], str]


def _understood(name: str, kind: str, read: Callable[[], T]) -> T | HintAnswer:
    try:
        return read()
    except (msgspec.ValidationError, InvalidRequest) as wrong:
        return HintAnswer(name, kind, "rejected", shorten(str(wrong)))


def _as(kind: type[T], raw: object) -> T:
    return msgspec.convert(raw, kind, strict=True)


# ── kv_hints ────────────────────────────────────────────────────────────────────────────────────────────────────


class _Action(msgspec.Struct, frozen=True):
    action_id: Id
    action_type: Id
    action_version: Id
    payload: dict[str, Any]


class _Envelope(msgspec.Struct, frozen=True):
    protocol_version: Id
    message_id: Id
    actions: list[dict[str, Any]]


class _Directive(msgspec.Struct, frozen=True):
    priority: Priority
    duration: Seconds
    start: Count = 0
    end: Count | None = None
    covers_output: bool = False


class _Retain(msgspec.Struct, frozen=True):
    directives: Annotated[list[_Directive], Meta(max_length=DIRECTIVES_MAX)]


class _SetPriority(msgspec.Struct, frozen=True):
    value: Priority
    ttl_seconds: Seconds
    target: Literal["request_cached"] = "request_cached"


class _Pin(msgspec.Struct, frozen=True):
    name: Name
    ttl_seconds: Seconds


class _Release(msgspec.Struct, frozen=True):
    name: Name | None = None
    session_id: Name | None = None


class _OfSession(msgspec.Struct, frozen=True):
    session_id: Name


class _OfSessionOrPrompt(msgspec.Struct, frozen=True):
    session_id: Name | None = None


def _kv_hints(raw: object) -> Read:
    envelope = _as(_Envelope, raw)
    actions, answers = list[Action](), list[HintAnswer]()
    for place, given in enumerate(envelope.actions[:ACTIONS_MAX]):
        names = (given.get(key) for key in ("action_id", "action_type"))
        name, kind = (name[:64] if isinstance(name, str) else "" for name in names)
        name = name or str(place)
        found = _understood(name, kind, lambda given=given: _action(_as(_Action, given)))  # type: ignore[misc]
        (answers if isinstance(found, HintAnswer) else actions).append(found)  # type: ignore[arg-type]
    if (more := len(envelope.actions) - ACTIONS_MAX) > 0:
        answers.append(
            HintAnswer("kv_hints", "kv_hints", "rejected", f"the last {more}: more than {ACTIONS_MAX} actions")
        )
    return actions, answers, ""


def _action(given: _Action) -> Action | HintAnswer:
    if given.action_type not in _ACTIONS:
        return HintAnswer(given.action_id, given.action_type, "ignored", "this action is unknown")
    if given.action_version.partition(".")[0] != "1":
        return HintAnswer(given.action_id, given.action_type, "ignored", "this version is unknown; 1.0 is known")
    payload, verb_of = _ACTIONS[given.action_type]
    verb = verb_of(_as(payload, given.payload))
    if isinstance(verb, str):
        return HintAnswer(given.action_id, given.action_type, "ignored", verb)
    return _bounded(given.action_id, given.action_type, verb)


def _bounded(name: str, kind: str, verb: Verb) -> Action:
    if isinstance(verb, Keep | PinPrompt) and verb.seconds > DURATION_S_MAX:
        shorter = replace(verb, seconds=DURATION_S_MAX)
        return Action(name, kind, shorter, f"kept for {DURATION_S_MAX / 3600:.0f} hours at most")
    return Action(name, kind, verb)


NOT_LESS = f"blocks of priority {PRIORITY} and less leave as others do"


def _keep(directives: list[_Directive]) -> Keep | str:
    """Priorities do not rise along the tokens, and a block is worth nothing without those before it: so the furthest
    that is above the usual is kept, with all before it, for the time of the shortest."""
    last = PRIORITY_MAX
    for one in directives:
        if one.end is not None and one.end <= one.start:
            raise InvalidRequest(f"a directive from token {one.start} to {one.end} is empty")
        if one.priority > last:
            raise InvalidRequest("priorities must not rise along the tokens")
        last = one.priority
    high = [one for one in directives if one.priority > PRIORITY]
    if not high:
        return NOT_LESS
    ends = [None if one.covers_output else one.end for one in high]
    tokens = None if None in ends else max(end for end in ends if end is not None)
    return Keep(tokens, min(one.duration for one in high))


_ACTIONS: dict[str, tuple[type, Callable[[Any], Verb | str]]] = {
    "kv.retain": (_Retain, lambda given: _keep(given.directives)),
    "kv.pin": (_Pin, lambda given: PinPrompt(given.name, given.ttl_seconds)),
    "kv.release": (_Release, lambda given: Release(given.name, given.session_id)),
    "kv.prefetch": (_OfSession, lambda given: Prefetch(given.session_id)),
    "kv.demote": (_OfSessionOrPrompt, lambda given: Demote(given.session_id)),
    "vllm.set_priority": (
        _SetPriority,
        lambda given: Keep(None, given.ttl_seconds) if given.value > PRIORITY else NOT_LESS,
    ),
}


# ── the others ──────────────────────────────────────────────────────────────────────────────────────────────────


class _AgentHint(msgspec.Struct, frozen=True):
    schema_version: Count | Id = 1
    trajectory_id: Annotated[str, Meta(max_length=128)] = ""
    kv_priority: Priority = PRIORITY
    lease_until: Annotated[float, Meta(ge=0, le=1e11)] | None = None


def _agent_hint(raw: object) -> Read:
    given = _as(_AgentHint, raw)
    name = "agent_hint"
    if str(given.schema_version).partition(".")[0] != "1":
        return [], [HintAnswer(name, name, "ignored", "this version is unknown; 1 is known")], ""
    if given.kv_priority <= PRIORITY or given.lease_until is None:
        return [], [HintAnswer(name, name, "ignored", NOT_LESS)], given.trajectory_id
    return [Action(name, name, Keep(None, DURATION_S_MAX, given.lease_until))], [], given.trajectory_id


class _TokenRange(msgspec.Struct, frozen=True):
    token_start: Count = 0
    token_end: Count | None = None
    priority: Priority = PRIORITY
    duration_ms: Annotated[float, Meta(gt=0)] | None = None


class _RetentionConfig(msgspec.Struct, frozen=True):
    token_range_retention_configs: Annotated[list[_TokenRange], Meta(max_length=DIRECTIVES_MAX)]


def _retention_config(raw: object) -> Read:
    name, given = "kv_cache_retention_config", _as(_RetentionConfig, raw)
    actions, answers = list[Action](), list[HintAnswer]()
    for place, one in enumerate(given.token_range_retention_configs):
        each = f"{name}[{place}]"
        if one.priority <= PRIORITY:
            answers.append(HintAnswer(each, name, "ignored", NOT_LESS))
            continue
        asked = DURATION_S_MAX + 1 if one.duration_ms is None else one.duration_ms / 1000
        actions.append(_bounded(each, name, Keep(one.token_end, asked)))
    return actions, answers, ""


_READERS: dict[str, Callable[[object], Read]] = {
    "kv_hints": _kv_hints,
    "agent_hint": _agent_hint,
    "kv_cache_retention_config": _retention_config,
}


class _Breakpoint(msgspec.Struct, frozen=True):
    type: Literal["ephemeral"] = "ephemeral"
    ttl: Literal["5m", "1h"] = "5m"
    tokens: Count | None = None


class _Breakpoints(msgspec.Struct, frozen=True):
    points: Annotated[list[_Breakpoint], Meta(max_length=4)]


def _classes(raw: Mapping[str, Any]) -> tuple[str, tuple[tuple[int, int, str], ...]]:
    """Classes of the prompt and of parts of it. Where a breakpoint says after how many tokens it lies, those before it
    are of its class; else the whole prompt."""
    wanted = raw.get("prompt_cache_retention")
    named = {"in_memory": "in_memory", "in-memory": "in_memory", "24h": "24h", None: ""}
    if not isinstance(wanted, str | None) or wanted not in named:
        raise InvalidRequest("prompt_cache_retention must be in_memory or 24h")
    retention = named[wanted]
    given = raw.get("cache_control")
    if given is None:
        return retention, ()
    try:
        points = _as(_Breakpoints, {"points": given if isinstance(given, list) else [given]}).points
    except msgspec.ValidationError:  # it repeats what the client wrote, and this is logged
        raise InvalidRequest("cache_control must be breakpoints of type ephemeral with a ttl of 5m or 1h") from None
    whole = max((point.ttl for point in points if point.tokens is None), key=parse_duration, default="")
    ranges = [(0, point.tokens, point.ttl) for point in points if point.tokens]
    return retention or whole, tuple(ranges)


def _session(raw: object) -> str:
    return raw if isinstance(raw, str) and 0 < len(raw) <= SESSION_CHARS_MAX else ""
