"""Questions of commands to a running cache, over its trace socket: one line there, one line back."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtier.cli.trace import SocketSilent, connected, socket_of
from kvtier.errors import FormatError, InvalidRequest
from kvtier.units import shorten

ANSWER_S = 60.0
ANSWER_BYTES_MAX = 16 << 20
NAME_CHARS_MAX = 80


def ask(source: Path, question: Mapping[str, Any], timeout_s: float = ANSWER_S) -> dict[str, Any]:
    """The answer of the cache at this socket, or at that of this YAML file. Raises SocketSilent where there is none in
    time, InvalidRequest with the reason of a refusal, FormatError for what is no answer."""
    path, held, until_s = socket_of(source), bytearray(), time.monotonic() + timeout_s
    with connected(path) as connection:
        try:
            connection.sendall(json.dumps(question).encode() + b"\n")
            while time.monotonic() < until_s:
                try:
                    part = connection.recv(1 << 20)
                except TimeoutError:
                    continue
                held += part
                *lines, rest = held.split(b"\n")
                for line in lines:
                    if (answer := answer_in(bytes(line))) is not None:
                        return answer
                held = bytearray(rest)
                if len(held) > ANSWER_BYTES_MAX:
                    raise FormatError(f"{path}: what answers is no trace socket of kvtier: its line does not end")
                if not part:
                    raise SocketSilent(f"{path}: no answer: the release of kvtier that runs there takes no questions")
        except OSError as wrong:
            raise SocketSilent(f"{path}: no answer: {wrong}") from None
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
