"""Questions to a running cache about its latest requests, and their answers, as JSON objects in one line each.

    {"ask": "request", "name": text, "earlier": text or null, "excerpt": true}    why it was not given more
    {"ask": "breaks"}                                                             the dearest ones
    {"ask": "latest"}                                                             heat of prefixes, slow requests
    {"ask": "reload", "file": path or null}                                       the cache reads its YAML file anew

An answer has `kvtier_answer`, or `refused` with the reason. No salt, no key and no token of a prompt is in it, but for
the tokens around the place where two prompts part, if `excerpt` asks for them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from kvtier.errors import InvalidRequest, KVTierError
from kvtier.journal.breaks import dearest, loss_of, losses, nearest
from kvtier.journal.figures import heat, slow, told
from kvtier.journal.journal import NAME_CHARS_MAX, Journal
from kvtier.journal.parting import Parting
from kvtier.journal.served import Remembered
from kvtier.units import shorten

ANSWER = 1
_REFUSAL_CHARS = 2000
BEFORE, BEHIND = 64, 448
"""Tokens of an excerpt before and behind the place."""


class Answers:
    """Answers about one journal. Thread-safe; takes up to a second of processor time, with many rests."""

    def __init__(
        self,
        journal: Journal,
        wall: Callable[[], float],
        block_s: Callable[[], float | None],
        reload: Callable[[object], dict[str, Any]] | None = None,
    ) -> None:
        """`block_s`: what a block takes to compute, in seconds, as far as that is known. `reload` has the cache read
        its file, which must be the one that it is given unless that is None, and says what has changed; it raises
        ConfigError or InvalidRequest."""
        self._reload = reload
        self._journal = journal
        self._wall = wall
        self._block_s = block_s

    def to(self, line: bytes) -> dict[str, Any]:
        """The answer to a line. Never raises for what it says."""
        try:
            question = json.loads(line)
            if not isinstance(question, dict):
                raise InvalidRequest("a question is a JSON object")
            return {"kvtier_answer": ANSWER, **self._answer(question)}
        except (ValueError, RecursionError, KVTierError) as wrong:
            return {"kvtier_answer": ANSWER, "refused": str(wrong)[:_REFUSAL_CHARS]}

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        match question.get("ask"):
            case "request":
                return self._request(question)
            case "breaks":
                return self._breaks()
            case "latest":
                return self._latest()
            case "reload" if self._reload is not None:
                return self._reload(question.get("file"))
        raise InvalidRequest("ask is request, breaks, latest or reload")

    def _about(self, latest: list[Remembered]) -> dict[str, Any]:
        since = min((one.served.at_s for one in latest), default=None)
        return {"requests": len(latest), "since_s": None if since is None else round(self._wall() - since, 1)}

    def _latest(self) -> dict[str, Any]:
        latest, block, now = self._journal.latest(), self._journal.block_tokens, self._wall()
        return {
            **self._about(latest),
            "prefixes": [asdict(row) for row in heat(latest, block, self._journal.secret, now)],
            "slow": slow(latest, block, self._block_s(), now),
        }

    def _breaks(self) -> dict[str, Any]:
        latest, block = self._journal.latest(), self._journal.block_tokens
        rows = dearest(losses(latest, block), block, self._block_s(), self._journal.secret)
        return {**self._about(latest), "breaks": [asdict(row) for row in rows]}

    def _request(self, question: dict[str, Any]) -> dict[str, Any]:
        latest = self._journal.latest()
        number = _find(latest, question.get("name"), "name")
        later, now = latest[number], self._wall()
        if question.get("earlier") is not None:
            at: int | None = _find(latest, question["earlier"], "earlier")
            if at == number:
                raise InvalidRequest("earlier: both are the same request")
        else:
            at = nearest(latest[: number + 1])[number]
        answer: dict[str, Any] = {**self._about(latest), "request": told(later.served, now), "earlier": None}
        if at is None:
            return answer
        loss = loss_of(latest[at], later, self._journal.block_tokens)
        block_s, lost = self._block_s(), loss.parted + loss.gone
        answer |= {
            "earlier": told(loss.earlier.served, now),
            "same_tokens": loss.same,
            "cause": loss.cause,
            "parted_tokens": loss.parted,
            "gone_tokens": loss.gone,
            "lost_seconds": None if block_s is None else round(lost / self._journal.block_tokens * block_s, 3),
            "pause_s": round(max(0.0, later.served.at_s - loss.earlier.served.at_s), 1),
        }
        if question.get("excerpt") is True and loss.parting is not None:
            answer["excerpt"] = _excerpt(loss.earlier, later, loss.parting)
        return answer


def _find(latest: list[Remembered], name: object, key: str) -> int:
    """The latest request of this name; the OpenAI server numbers the prompts of one."""
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{key}: the id of a request")
    for wanted in (name, f"{name}-0"):
        found = [number for number, one in enumerate(latest) if one.served.name == wanted[:NAME_CHARS_MAX]]
        if found:
            return found[-1]
    raise InvalidRequest(f"{key}: {shorten(name)} is not among the latest {len(latest)} requests that have ended")


def _excerpt(earlier: Remembered, later: Remembered, parting: Parting) -> dict[str, Any]:
    begin = max(0, parting.same - BEFORE)
    parts = {
        name: one.tokens[begin : parting.same + BEHIND].tolist()
        for name, one in (("earlier", earlier), ("later", later))
    }
    return {"begin": begin, **parts}
