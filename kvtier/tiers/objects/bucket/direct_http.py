"""Ranged GETs laid straight into the caller's memory, over plain HTTP and on URLs that a client library has signed.

Between a socket and a buffer a client library copies two to four times and crosses threads; for a tier that moves
gigabytes this is most of its CPU. So the bytes of blocks come this way, and everything else by the library: other
verbs, small reads, TLS, proxies, and every answer that is not exactly the range that was asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from kvtier.tiers.objects.bucket.protocol import TIER, Transient

DIRECT_BYTES = 16 << 10
"""Reads of at least so much are worth a URL of their own."""

REFUSALS_MAX = 8
"""After so many answers in a row that are the fault of this way, it is given up for REST_S."""

REST_S = 300.0

_HEAD_BYTES_MAX = 64 << 10
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)
_NOT_THE_WAYS_FAULT = frozenset({404, 408, 409, 429})

SIGNED_S = 3600
"""How long a signed URL holds; each is used once, at once, on clocks that may differ."""

Headers = dict[str, str]


def reachable(endpoint: str) -> bool:
    """Whether an endpoint speaks plain HTTP and no proxy stands before it. Pure, but for the proxies' settings, which
    are the standard library's."""
    parts = urlsplit(endpoint)
    return (
        parts.scheme == "http"
        and endpoint.isascii()
        and (not getproxies().get("http") or bool(proxy_bypass(parts.hostname or "")))
    )


def size_of(headers: Headers) -> int:
    """The size of the whole object, by an answer of `DirectHTTP.get`."""
    return int(headers["content-range"].rpartition("/")[2])


def answer_of(headers: Headers) -> dict[str, Any]:
    """What botocore makes of the same headers, as far as a `Stat` needs it."""
    prefix, modified = "x-amz-meta-", None
    with contextlib.suppress(TypeError, ValueError):
        modified = parsedate_to_datetime(headers.get("last-modified", ""))
    return {
        "ETag": headers.get("etag", ""),
        "LastModified": modified,
        "Metadata": {name.removeprefix(prefix): value for name, value in headers.items() if name.startswith(prefix)},
        "ResponseMetadata": {"HTTPHeaders": headers},
    }


class _Stale(Exception):
    """The connection ended before it gave a single byte of an answer."""


class DirectHTTP:
    """Connections to one server, on one event loop. `usable`: whether it is worth asking."""

    def __init__(self, connect_s: float, read_s: float) -> None:
        """Seconds until a connection stands, and without a byte on one."""
        self._connect_s = connect_s
        self._read_s = read_s
        self._idle: list[_Line] = []
        self._refusals = 0
        self._rests_until = 0.0

    @property
    def usable(self) -> bool:
        return asyncio.get_running_loop().time() >= self._rests_until

    async def get(self, url: str, start: int, into: Sequence[memoryview]) -> Headers | None:
        """Fill `into` with the object's bytes from `start` on; the answer's headers, names in lower case.

        None if the server gave another answer than these very bytes, whatever it was: ask it by the library. Raises
        Transient. Nothing is written to `into` after this returns, raises or is cancelled.
        """
        parts = urlsplit(url)
        stop = start + sum(len(view) for view in into)
        request = (
            f"GET {parts.path}?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\nAccept-Encoding: identity\r\n"
            f"Range: bytes={start}-{stop - 1}\r\n\r\n"
        ).encode("ascii")
        while self._idle:
            line = self._idle.pop()
            if line.alive:
                try:
                    return await self._ask(line, request, start, stop, into)
                except _Stale:
                    break  # the server had closed it meanwhile
        line = await self._connect(parts.hostname or "", parts.port or 80)
        try:
            return await self._ask(line, request, start, stop, into)
        except _Stale:
            raise Transient(TIER, "get", "closed without an answer") from None

    async def _connect(self, host: str, port: int) -> _Line:
        try:
            async with asyncio.timeout(self._connect_s):
                _, line = await asyncio.get_running_loop().create_connection(_Line, host, port)
        except (OSError, TimeoutError) as error:
            raise Transient(TIER, "connect", type(error).__name__) from None
        return line

    async def _ask(
        self, line: _Line, request: bytes, start: int, stop: int, into: Sequence[memoryview]
    ) -> Headers | None:
        try:
            status, headers = await line.ask(request, start, stop, into, self._read_s)
        except BaseException:
            line.abort()
            raise
        if headers is None:
            line.abort()
            self._refusals += status < 500 and status not in _NOT_THE_WAYS_FAULT
            if self._refusals >= REFUSALS_MAX:
                self._refusals, self._rests_until = 0, asyncio.get_running_loop().time() + REST_S
            return None
        self._refusals = 0
        if headers.get("connection", "").lower() == "close":
            line.abort()
        else:
            self._idle.append(line)
        return headers

    def close(self) -> None:
        """Let go of all idle connections. Idempotent."""
        while self._idle:
            self._idle.pop().abort()


class _Line(asyncio.BufferedProtocol):
    """One connection: one request at a time, its body received into the caller's views."""

    def __init__(self) -> None:
        self.alive = True
        self._transport: asyncio.Transport | None = None
        self._head = bytearray(_HEAD_BYTES_MAX)
        self._filled = 0
        self._views: deque[memoryview] = deque()
        self._range = (0, 0)
        self._headers: Headers | None = None
        self._answer: asyncio.Future[tuple[int, Headers | None]] | None = None
        self._received = 0
        self._timer: asyncio.TimerHandle | None = None

    async def ask(
        self, request: bytes, start: int, stop: int, into: Sequence[memoryview], read_s: float
    ) -> tuple[int, Headers | None]:
        """Status and, if `into` is filled, headers. Raises _Stale or Transient; then the line must be aborted."""
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self._filled = self._received = 0
        self._headers, self._range = None, (start, stop)
        self._views = deque(view for view in into if len(view))
        answer: asyncio.Future[tuple[int, Headers | None]] = loop.create_future()
        self._answer = answer
        try:
            self._transport.write(request)
            self._watch(0, read_s)
            return await answer
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._answer = None

    def _watch(self, received: int, read_s: float) -> None:
        """Look again in `read_s` whether more than `received` bytes have come."""
        self._timer = asyncio.get_running_loop().call_later(read_s, self._look, received, read_s)

    def _look(self, received: int, read_s: float) -> None:
        if self._received == received:
            self._fail(Transient(TIER, "get", "stalled"))
        else:
            self._watch(self._received, read_s)

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def abort(self) -> None:
        """Close at once; no view is written to any more."""
        self.alive = False
        self._views.clear()
        if self._transport is not None:
            self._transport.abort()

    # -- what the transport calls -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.alive = False
        self._fail(Transient(TIER, "get", "body shorter than announced") if self._received else _Stale())

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._headers is not None and self._views:
            return self._views[0]
        return memoryview(self._head)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._received += nbytes
        if self._answer is None or self._answer.done():
            self.abort()  # more than was announced, or an answer to nothing
        elif self._headers is not None:
            self._advance(nbytes)
        else:
            seen = self._filled
            self._filled += nbytes
            end = self._head.find(b"\r\n\r\n", max(0, seen - 3), self._filled)
            if end >= 0:
                self._begin(end)
            elif self._filled == len(self._head):
                self._answer.set_result((0, None))

    def _begin(self, end: int) -> None:
        """The head is whole: is the body what was asked for?"""
        assert self._answer is not None
        status, headers = _parse(bytes(self._head[:end]))
        found = _RANGE.fullmatch(headers.get("content-range", ""))
        start, stop = self._range
        if (
            status != 206
            or found is None
            or (int(found[1]), int(found[2]) + 1) != (start, stop)
            or headers.get("content-length") != str(stop - start)
            or "transfer-encoding" in headers
            or headers.get("content-encoding", "identity") != "identity"
        ):
            self._answer.set_result((status, None))
            return
        self._headers = headers
        rest = memoryview(self._head)[end + 4 : self._filled]
        while len(rest) and self._views:
            view = self._views[0]
            count = min(len(view), len(rest))
            view[:count] = rest[:count]
            rest = rest[count:]
            self._advance(count)
        if len(rest):
            self.abort()

    def _advance(self, count: int) -> None:
        """`count` bytes have come into the first view."""
        assert self._answer is not None
        view = self._views.popleft()[count:]
        if len(view):
            self._views.appendleft(view)
        elif not self._views:
            self._answer.set_result((206, self._headers))


def _parse(head: bytes) -> tuple[int, Headers]:
    """Status (0 if it is no HTTP/1.1) and headers."""
    line, *rest = head.decode("latin-1").split("\r\n")
    version, _, tail = line.partition(" ")
    status = int(tail[:3]) if version == "HTTP/1.1" and tail[:3].isascii() and tail[:3].isdigit() else 0
    return status, {name.strip().lower(): value.strip() for name, _, value in (each.partition(":") for each in rest)}
