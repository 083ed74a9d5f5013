"""The requests of a running cache, told to whoever listens on a Unix socket: when, how long, and which blocks.

    {"kvtier_trace": 1, "block_tokens": 16, "namespace": {…}}                    the first line
    {"at": s, "input": tokens, "output": tokens, "missed": n, "ids": base64}     one per request

A connection that says a line is not told requests: it has a question about the latest ones, and is answered by one line
(`kvtier.journal.answers`).

`ids` are the prompt's whole blocks, 8 bytes each: a digest under a key that this process draws and tells nobody. Equal
blocks have equal ids for as long as it runs; no text, token, salt or key can be found from them. `missed`: requests so
far that came too fast for this listener. `namespace`: its fields, as a G3 directory stores them, too. Nobody listens: a
request costs one comparison.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import logging
import os
import secrets
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.clock import Clock
from kvtier.identity.keys import BlockKey
from kvtier.supervisor import Supervisor, Unwatched, abandon, soon

log = logging.getLogger(__name__)

VERSION = 1
ID_BYTES = 8
WAITING_MAX = 1024
"""Requests that wait for a listener; later ones are missed."""

WAITING_BLOCKS_MAX = 1 << 18
"""Blocks of them together, some 25 MiB of keys, but for a single request that has more."""

LISTENERS_MAX = 4
QUESTION_BYTES_MAX = 4096
_SEND_S = 5.0
_ANSWER_S = 60.0
_ASKED_S = 2.0
"""How soon a question comes where there is no place for a listener."""

_PEER = struct.Struct("3i")  # pid, uid, gid


class _Seen(NamedTuple):
    at_s: float
    input_tokens: int
    output_tokens: int
    chain: tuple[BlockKey, ...]


class _Listener:
    """What one connection has not been told yet. On the loop."""

    def __init__(self) -> None:
        self.waiting: deque[_Seen] = deque()
        self.news = asyncio.Event()
        self.missed = 0
        self._blocks = 0  # of those that wait

    def tell(self, seen: _Seen) -> None:
        blocks = self._blocks + len(seen.chain)
        if len(self.waiting) >= WAITING_MAX or (self.waiting and blocks > WAITING_BLOCKS_MAX):
            self.missed += 1
            return
        self.waiting.append(seen)
        self._blocks = blocks
        self.news.set()

    def told(self) -> None:
        """The oldest that waits was told."""
        self._blocks -= len(self.waiting.popleft().chain)


class RequestTrace:
    """See the module. `path` None: never. Built closed."""

    def __init__(
        self,
        path: Path | None,
        block_tokens: int,
        clock: Clock,
        namespace: Mapping[str, Any] | None = None,
        answer: Callable[[bytes], Mapping[str, Any]] | None = None,
    ) -> None:
        """`answer(line)` answers a question, on a thread; None: there are no answers."""
        self._path = path
        self._answer = answer
        self._answering = asyncio.Lock()
        self._namespace = namespace
        self._block_tokens = block_tokens
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._listeners: set[_Listener] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, supervisor: Supervisor) -> None:
        """Listen, on the running loop, until the supervisor ends. A socket that cannot be made is logged, and nobody
        can listen; an older one at the path is replaced."""
        if self._path is None:
            return
        self._loop = asyncio.get_running_loop()
        supervisor.start("trace socket", lambda: self._listen(supervisor), Unwatched())

    def record(
        self, chain: Sequence[BlockKey], input_tokens: int, output_tokens: int = 0, at_s: float | None = None
    ) -> None:
        """A request for a prompt of these blocks was served; `at_s`: wall time of its arrival, None for now.
        Thread-safe; does not wait."""
        if self._listeners:
            at_s = self._clock.wall() if at_s is None else at_s
            soon(self._loop, self._tell, _Seen(at_s, input_tokens, output_tokens, tuple(chain)))

    def _tell(self, seen: _Seen) -> None:
        for listener in self._listeners:
            listener.tell(seen)

    async def _listen(self, supervisor: Supervisor) -> None:
        assert self._path is not None
        try:
            server = await asyncio.start_unix_server(
                lambda reader, writer: supervisor.spawn(self._serve(reader, writer)),
                self._path,
                limit=QUESTION_BYTES_MAX,
            )
            made = self._path.stat().st_ino
        except OSError as error:
            log.warning("trace.socket: %s: %s; requests are not told", self._path, error)
            return
        try:
            self._path.chmod(0o600)
            await asyncio.get_running_loop().create_future()  # until it is cancelled
        finally:
            server.close()
            with contextlib.suppress(OSError):
                if self._path.stat().st_ino == made:  # not that of a cache that was opened later
                    self._path.unlink()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        listener = _Listener()
        over = asyncio.ensure_future(_line_of(reader))  # a listener says nothing: its end, a question, or a mistake
        over.add_done_callback(lambda _: listener.news.set())
        abandon(over)
        try:
            if not _is_ours(writer.get_extra_info("socket")):
                return
            if len(self._listeners) < LISTENERS_MAX:
                self._listeners.add(listener)
                header = {"kvtier_trace": VERSION, "block_tokens": self._block_tokens, "namespace": self._namespace}
                await self._send(writer, json.dumps(header))
            elif not (await asyncio.wait([over], timeout=_ASKED_S))[0]:
                return
            while not over.done():
                await listener.news.wait()
                listener.news.clear()
                while listener.waiting and not over.done():
                    seen, missed = listener.waiting[0], listener.missed
                    await self._send(writer, await asyncio.to_thread(self._line, seen, missed))
                    listener.told()
            self._listeners.discard(listener)
            if (question := over.result()) and self._answer is not None:
                async with self._answering:  # one at a time: they take processor time of the engine's
                    answer = await asyncio.wait_for(asyncio.to_thread(self._answer, question), _ANSWER_S)
                await self._send(writer, await asyncio.to_thread(json.dumps, answer))
                writer.close()
                await asyncio.wait_for(writer.wait_closed(), _SEND_S)
        except (OSError, TimeoutError) as gone:
            log.info("a listener of the trace socket is gone: %s", gone or "it does not read")
        finally:
            over.cancel()
            self._listeners.discard(listener)
            writer.transport.abort()

    async def _send(self, writer: asyncio.StreamWriter, line: str) -> None:
        writer.write(line.encode() + b"\n")
        await asyncio.wait_for(writer.drain(), _SEND_S)

    def _line(self, seen: _Seen, missed: int) -> str:
        ids = b"".join(hashlib.blake2b(key, digest_size=ID_BYTES, key=self._key).digest() for key in seen.chain)
        line = {"at": round(seen.at_s, 3), "input": seen.input_tokens, "output": seen.output_tokens, "missed": missed}
        return json.dumps({**line, "ids": base64.b64encode(ids).decode()})


async def _line_of(reader: asyncio.StreamReader) -> bytes:
    """The first line that is said; nothing where the connection ends, or says more than a question has."""
    try:
        line = await reader.readline()
    except ValueError:  # no end within the limit
        return b""
    return line if line.endswith(b"\n") else b""


def _is_ours(connection: socket.socket) -> bool:
    """Whether the other end is this user, or root."""
    return user_of(connection) in (0, os.geteuid())


def user_of(connection: socket.socket) -> int:
    """The user at the other end of a Unix socket: who listened, or who connected."""
    _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(uid)
