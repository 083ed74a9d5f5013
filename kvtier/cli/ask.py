"""Questions of commands to a running cache, over its trace socket: one line there, one line back."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtier.cli.trace_socket import SocketSilent, connected, lines_of, socket_of
from kvtier.errors import FormatError, InvalidRequest
from kvtier.request_trace import QUESTION_BYTES_MAX
from kvtier.units import shorten

ANSWER_S = 60.0
ANSWER_BYTES_MAX = 16 << 20
NAME_CHARS_MAX = 80


def ask(source: Path, question: Mapping[str, Any], timeout_s: float = ANSWER_S) -> dict[str, Any]:
    """The answer of the cache at this socket, or at that of this YAML file. Raises SocketSilent where there is none in
    time, InvalidRequest for a question that is too long, or with the reason of a refusal, FormatError for what is no
    answer."""
    return ask_at(socket_of(source), question, timeout_s)


def ask_at(path: Path, question: Mapping[str, Any], timeout_s: float = ANSWER_S) -> dict[str, Any]:
    """The same of the cache at this socket."""
    line, until_s = json.dumps(question).encode() + b"\n", time.monotonic() + timeout_s
    if len(line) > QUESTION_BYTES_MAX:
        raise InvalidRequest(f"a question has at most {QUESTION_BYTES_MAX} bytes: no request's id is as long as that")
    with connected(path) as connection:
        try:
            connection.sendall(line)
            for said in lines_of(connection, until_s, ANSWER_BYTES_MAX):
                if (answer := answer_in(said)) is not None:
                    return answer
        except OSError as wrong:
            raise SocketSilent(f"{path}: no answer: {wrong}") from None
    if time.monotonic() < until_s:
        raise SocketSilent(f"{path}: no answer: the release of kvtier that runs there takes no questions")
    raise SocketSilent(f"{path}: no answer within {timeout_s:.0f} s")


def answer_in(line: bytes) -> dict[str, Any] | None:
    """The answer, if the line is one: requests may be told before it. Raises FormatError or InvalidRequest."""
    if b"kvtier_answer" not in line:
        return None
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict) or answer.get("kvtier_answer") != 1:
        raise FormatError("what answers is no trace socket of this release of kvtier")
    if "refused" in answer:
        raise InvalidRequest(shown(answer["refused"], 2000))
    return answer


def shown(text: object, chars_max: int = NAME_CHARS_MAX) -> str:
    """A name that somebody else gave, for a terminal: no control characters, and short."""
    given = str(text)
    return given if given.isprintable() and len(given) <= chars_max else shorten(given[:chars_max])
