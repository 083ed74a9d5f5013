"""Calls of agents with all their messages, as LMCache's collection of agent traces has them.

    {"session_id": text, "input": [{"role", "content", …}, …], "output_length": tokens, "pre_gap": s}

One line per call of a model; a session's lines are in order. `pre_gap` is the pause before the call; a line may have
`timestamp` instead, in seconds since the start of the trace, or `session_timestamp`, since that of its session.
Sessions without a start begin at a time drawn uniformly over a day, by their names. `input` may be a text, too.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtier.bench.retention.json_lines import TraceLine, lines
from kvtier.bench.retention.text_blocks import PROMPT_BLOCK_TOKENS, tokens_of
from kvtier.bench.retention.trace import DAY_S, Names, Request, Trace, finish
from kvtier.errors import InvalidRequest

KEYS = {"session_id", "input"}
"""By which a line of this format is known."""

SESSIONS_MAX = 64
"""Sessions whose prompt so far is remembered: a call repeats nearly all of the one before."""


class _Session:
    """The prompt of one session's latest call, message by message."""

    def __init__(self, number: int, start_s: float) -> None:
        self.number = number
        self.at = start_s
        self.texts: list[str] = []
        self._ends: list[int] = []  # tokens up to the end of each message
        self._tokens: list[str] = []
        self._blocks: list[int] = []

    def prompt(self, texts: list[str], names: Names) -> tuple[list[int], int]:
        """The blocks and tokens of a prompt; only what follows the messages that are known is cut anew."""
        pairs = enumerate(zip(texts, self.texts, strict=False))
        same = next((at for at, (new, old) in pairs if new != old), min(len(texts), len(self.texts)))
        size, kept = PROMPT_BLOCK_TOKENS, self._ends[same - 1] if same else 0
        del self._tokens[kept:], self._ends[same:], self._blocks[kept // size :]
        for text in texts[same:]:
            self._tokens += tokens_of(text)
            self._ends.append(len(self._tokens))
        parent = self._blocks[-1] if self._blocks else None
        for start in range(len(self._blocks) * size, len(self._tokens) // size * size, size):
            part = "\0".join(self._tokens[start : start + size]).encode("utf-8", "surrogatepass")
            parent = names.of((parent, hashlib.blake2b(part, digest_size=12).digest()))
            self._blocks.append(parent)
        self.texts = texts
        return list(self._blocks), len(self._tokens)


def from_lines(path: Path) -> Trace:
    """Read such a file. Raises InvalidRequest."""
    names, numbers, requests = Names(), Names(), list[Request]()
    sessions: OrderedDict[str, _Session] = OrderedDict()
    clocks: dict[str, float] = {}
    for line in lines(path):
        name = str(line.field("session_id"))
        session = sessions.pop(name, None)
        if session is None:
            begins = 0.0 if "timestamp" in line.fields else random.Random(name).uniform(0, DAY_S)
            session = _Session(numbers.of(name), clocks.setdefault(name, begins))
        sessions[name] = session
        if len(sessions) > SESSIONS_MAX:
            gone, left = sessions.popitem(last=False)
            clocks[gone] = left.at
        session.at = at = _time(line, session.at)
        blocks, size = session.prompt(_texts(line), names)
        made = line.tokens("output_length") if "output_length" in line.fields else 0
        requests.append(Request(at, blocks, size, made, session.number))
    return finish(path.stem, "lmcache", PROMPT_BLOCK_TOKENS, requests, len(names))


def _time(line: TraceLine, before_s: float) -> float:
    """When a call was made; `before_s`: the one before it, or the start of its session."""
    if "timestamp" in line.fields:
        return line.number("timestamp")
    if "session_timestamp" in line.fields:
        start = random.Random(str(line.fields["session_id"])).uniform(0, DAY_S)
        return start + line.number("session_timestamp")
    return before_s + (line.number("pre_gap") if "pre_gap" in line.fields else 0.0)


def _texts(line: TraceLine) -> list[str]:
    """The messages of a call as text, what a template adds but for a mark of each beginning."""
    given = line.field("input")
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
        raise InvalidRequest(f"{line.place}: input: expected a text or a list of messages")
    return [_text(message) for message in given]


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    rest = {key: value for key, value in message.items() if key not in ("role", "content")}
    calls = json.dumps(rest, sort_keys=True) if rest else ""
    return f"<{message.get('role')}>\n{content or ''}{calls}\n"
