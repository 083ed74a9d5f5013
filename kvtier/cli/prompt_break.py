"""Where two prompts part, and why: the likely cause of a prefix cache's miss. Pure.

A prompt is a list of parts in the order in which a chat template writes them: tools, then messages. Everything behind
the first difference is computed again, however much of it is equal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from kvtier.errors import InvalidRequest
from kvtier.retention.terms import BUILTIN

EXCERPT_CHARS = 60
TIME_MAX = 1e11
"""Seconds since the epoch; what is later is no time."""
CHARS_PER_TOKEN = 4
"""Of English text, about: where no tokenizer counts."""

_TIME = re.compile(
    r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?|\d\d?:\d\d(?::\d\d)?(?:\s?[AP]M)?"
    r"|\b1[5-9]\d{8}(?:\.\d+|\d{3})?\b|(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"
    r"|(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.? \d{1,2}(?:, \d{4})?"
)
_ID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b(?=[0-9a-f]*\d)[0-9a-f]{12,}\b|\b\d+\b", re.I)
_REPEATED_CHARS = 48
"""So many equal characters behind the break and later in the other prompt are no chance."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a prompt: `name` says which, such as `tools` or `messages[3] (user)`."""

    name: str
    text: str
    role: str = ""


@dataclass(frozen=True, slots=True)
class PromptText:
    """`parts` of a text, or `tokens` where only these are known. `tools`: as given. `at`: seconds since the epoch."""

    parts: tuple[Part, ...] = ()
    tokens: tuple[int, ...] | None = None
    tools: tuple[Any, ...] = ()
    model: str = ""
    at: float | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True, slots=True)
class Break:
    """Prompts agree for `same_tokens`; `lost_tokens` more of the earlier one had to be computed again, in whole blocks.
    `part` and the excerpts show the place; empty where one goes on after the other's end. `kept_by`: the shortest class
    that keeps the earlier prompt for the pause between them; "" if none does, None if the pause is not known."""

    same_tokens: int
    earlier_tokens: int
    later_tokens: int
    lost_tokens: int
    cause: str
    advice: str
    part: str = ""
    earlier: str = ""
    later: str = ""
    pause_s: float | None = None
    kept_by: str | None = None


ADVICE = {
    "none": "the later prompt goes on where the earlier one ends: all of it can be reused",
    "model": "the requests name different models or adapters, which share nothing",
    "unsorted_keys": "the same JSON with its keys in another order, or other white space: write it with sorted keys",
    "tool_order": "the same tools in another order: list them in a fixed order, by name for example",
    "changed_tools": "the tools differ: keep their list the same in a session, and allow a subset by other means",
    "timestamp": "a date or time changes in each request: put it behind what stays, or into the last message",
    "identifier": "a number or an identifier changes in each request: put it behind what stays",
    "truncated_history": "the oldest turns were dropped, so all that followed moved: drop many at once and seldom",
    "changed_system": "the system prompt differs: put what changes into a message behind it",
    "changed_message": "an earlier message was written anew: append instead of editing",
    "changed_text": "the texts differ from here on",
    "tokens": "the token ids differ from here on: give the texts, or a tokenizer, to learn why",
}  # fmt: skip


def read_prompt(raw: str, name: str) -> PromptText:
    """A prompt as text, as a list of token ids, or as the body of a request: `messages` and `tools`, `prompt`, or
    `prompt_token_ids`. `created` or `timestamp` say when. JSON that is nested too deep is text. Raises InvalidRequest
    that begins with `name`."""
    text = PromptText((Part("prompt", raw),))
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return text
    try:
        return _prompt_of(value, raw, name)
    except RecursionError:  # it could just be read
        return text


def _prompt_of(value: Any, raw: str, name: str) -> PromptText:
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return PromptText(tokens=tuple(value))
    if not isinstance(value, dict):
        return PromptText((Part("prompt", raw),))
    times: list[Any] = [value.get(key) for key in ("created", "timestamp")]
    at = next((float(time) for time in times if type(time) in (int, float) and 0 <= time <= TIME_MAX), None)
    model, tools = str(value.get("model", "")), value.get("tools") or []
    for key in ("prompt_token_ids", "token_ids", "prompt"):
        ids = value.get(key)
        if isinstance(ids, list) and ids and all(type(token) is int for token in ids):
            return PromptText(tokens=tuple(ids), model=model, at=at)
    if isinstance(value.get("prompt"), str):
        return PromptText((Part("prompt", value["prompt"]),), model=model, at=at)
    messages = value.get("messages")
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise InvalidRequest(f"{name}: a request has messages, prompt or prompt_token_ids")
    if not isinstance(tools, list):
        raise InvalidRequest(f"{name}: tools is a list")
    parts = [Part("system", _text_of(value["system"]), "system")] if value.get("system") else []
    parts += [Part("tools", "".join(f"{json.dumps(tool)}\n" for tool in tools), "tools")] if tools else []
    for place, message in enumerate(messages):
        role = str(message.get("role", ""))
        rest = {key: message[key] for key in message if key not in ("role", "content")}
        text = f"{role}: {_text_of(message.get('content'))}{json.dumps(rest) if rest else ''}\n"
        shown = role if role.isprintable() and len(role) <= EXCERPT_CHARS else repr(role[:EXCERPT_CHARS])
        parts.append(Part(f"messages[{place}] ({shown})", text, role))
    return PromptText(tuple(parts), None, tuple(tools), model, at)


def _text_of(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(
            one["text"] if isinstance(one, Mapping) and isinstance(one.get("text"), str) else json.dumps(one)
            for one in content
        )
    return "" if content is None else json.dumps(content)


def compare(
    earlier: PromptText,
    later: PromptText,
    tokens_of: Callable[[PromptText], Sequence[int]] | None = None,
    block_tokens: int = 16,
    pause_s: float | None = None,
) -> Break:
    """Where `later` leaves `earlier`. `tokens_of`: a tokenizer, without which tokens are estimated from characters.
    Raises InvalidRequest for a text and tokens without one."""
    if pause_s is None and earlier.at is not None and later.at is not None:
        pause_s = max(0.0, later.at - earlier.at)
    kept_by = None if pause_s is None else class_for(pause_s)
    texts = earlier.tokens is None and later.tokens is None
    if not texts and tokens_of is None and (earlier.tokens is None or later.tokens is None):
        raise InvalidRequest("one prompt is text and the other tokens: give --tokenizer")
    place = _agreed(earlier.text, later.text) if texts else 0
    if tokens_of is not None or not texts:
        one, two = (list(p.tokens if p.tokens is not None else tokens_of(p)) for p in (earlier, later))  # type: ignore[misc]
        same, lengths = _agreed(one, two), (len(one), len(two))
    else:
        same = place // CHARS_PER_TOKEN
        lengths = (len(earlier.text) // CHARS_PER_TOKEN, len(later.text) // CHARS_PER_TOKEN)
    reusable = min(lengths) // block_tokens * block_tokens
    lost = max(0, reusable - same // block_tokens * block_tokens)
    if earlier.model != later.model and earlier.model and later.model:
        return Break(0, *lengths, reusable, "model", ADVICE["model"], "model", earlier.model, later.model,
                     pause_s, kept_by)  # fmt: skip
    ended = place == len(earlier.text) if texts else same == lengths[0]
    if ended:
        return Break(same, *lengths, 0, "none", ADVICE["none"], pause_s=pause_s, kept_by=kept_by)
    try:
        cause = _cause(earlier, later, place) if texts else "tokens"
    except RecursionError:  # values that could just be read
        cause = "changed_text"
    part = _part_at(later if place < len(later.text) else earlier, place) if texts else f"token {same}"
    shown = (_excerpt(earlier.text, place), _excerpt(later.text, place)) if texts else (
        " ".join(map(str, (earlier.tokens or ())[same : same + 8])),
        " ".join(map(str, (later.tokens or ())[same : same + 8])),
    )  # fmt: skip
    return Break(same, *lengths, lost, cause, ADVICE[cause], part, *shown, pause_s, kept_by)


def class_for(pause_s: float) -> str:
    """The shortest built-in class that keeps blocks that long; "" for none."""
    fits = [terms for terms in BUILTIN.values() if not terms.isolate and terms.ttl is not None and terms.ttl >= pause_s]
    return min(fits, key=lambda terms: terms.ttl or 0.0).name if fits else ""


def _agreed(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many leading items are equal."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _part_at(prompt: PromptText, place: int) -> str:
    ends = accumulate(len(part.text) for part in prompt.parts)
    return next((part.name for part, end in zip(prompt.parts, ends, strict=True) if place < end), "the end")


def _excerpt(text: str, place: int) -> str:
    return text[max(0, place - EXCERPT_CHARS // 3) : place + EXCERPT_CHARS]


def _cause(earlier: PromptText, later: PromptText, place: int) -> str:
    in_tools = "tools" in (_part_at(earlier, place), _part_at(later, place))
    if in_tools and earlier.tools != later.tools:
        one, two = (sorted(map(_canonical, prompt.tools)) for prompt in (earlier, later))
        return "tool_order" if one == two else "changed_tools"
    if in_tools:  # equal values, written in another way
        return "unsorted_keys"
    if _dropped(earlier, later, place):
        return "truncated_history"
    if _same_json(earlier, later, place):
        return "unsorted_keys"
    for cause, pattern in (("timestamp", _TIME), ("identifier", _ID)):
        if _agrees_without(pattern, earlier.text, later.text, place):
            return cause
    role = next((part.role for part in later.parts if part.name == _part_at(later, place)), "")
    if role in ("system", "developer"):
        return "changed_system"
    return "changed_message" if role else "changed_text"


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _same_json(earlier: PromptText, later: PromptText, place: int) -> bool:
    """Whether some JSON around the place is equal but for the order of its keys, or its white space."""
    return any(
        one != two and one == one.strip() and _parsed(one) is not None and _parsed(one) == _parsed(two)
        for one, two in zip(_json_around(earlier.text, place), _json_around(later.text, place), strict=False)
    )


def _json_around(text: str, place: int) -> list[str]:
    """The objects and lists that begin before the place, outermost last, as far as they are JSON."""
    found, decoder = [], json.JSONDecoder()
    for start in range(min(place, len(text) - 1), max(-1, place - 4096), -1):
        if text[start] in "{[":
            try:
                _, end = decoder.raw_decode(text, start)
            except (ValueError, RecursionError):
                continue
            if end > place:
                found.append(text[start:end])
    return found[::-1]


def _parsed(text: str) -> object:
    value: object = json.loads(text)
    return value


def _agrees_without(pattern: re.Pattern[str], one: str, two: str, place: int) -> bool:
    """Whether the texts go on alike behind a find of the pattern at the place, in each of them."""
    finds = [next((m for m in pattern.finditer(text, max(0, place - 64)) if m.start() <= place <= m.end()), None)
             for text in (one, two)]  # fmt: skip
    if finds[0] is None or finds[1] is None or finds[0].group() == finds[1].group():
        return False
    rests = [text[find.end() :] for text, find in zip((one, two), finds, strict=True) if find is not None]
    rests = [pattern.sub("", rest[: 4 * EXCERPT_CHARS])[:EXCERPT_CHARS] for rest in rests]
    return _agreed(*rests) >= min(EXCERPT_CHARS // 3, *map(len, rests))


def _dropped(earlier: PromptText, later: PromptText, place: int) -> bool:
    """Whether what follows in the later prompt is further behind in the earlier one."""
    rest = later.text[place : place + _REPEATED_CHARS]
    if len(later.parts) > 1 and len(earlier.parts) > 1:
        following = [part.text for part in later.parts if part.role not in ("system", "developer", "tools")]
        before = [part.text for part in earlier.parts if part.role not in ("system", "developer", "tools")]
        return bool(following) and following[0] in before[1:]
    return len(rest) == _REPEATED_CHARS and rest in earlier.text[place + 1 :]
