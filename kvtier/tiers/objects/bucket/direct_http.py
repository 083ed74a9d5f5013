"""Ranged GETs read straight into the caller's memory, over plain HTTP and on URLs that a client library has signed.

Between a socket and a buffer a client library copies two to four times and crosses threads: most of the CPU of a tier
that moves gigabytes. So blocks are read this way, and the library does everything else: other verbs, small reads, TLS,
proxies, and every response that is not exactly the requested range.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from typing import Any, cast
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from kvtier.tiers.objects.bucket.endpoint import unreachable
from kvtier.tiers.objects.bucket.protocol import TIER, Scatter, Transient, clip

DIRECT_BYTES = 16 << 10
"""Reads of at least this size are worth a signed URL."""

REFUSALS_MAX = 8
"""After so many unusable responses in a row, only the library is used for REST_S."""

REST_S = 300.0

_HEAD_BYTES_MAX = 64 << 10
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)
_SERVER_ERRORS = frozenset({404, 408, 409, 429})

SIGNED_S = 3600
"""Validity of a signed URL. Each is used once, at once, but clocks may differ."""

Headers = dict[str, str]


def reachable(endpoint: str) -> bool:
    """Whether an endpoint speaks plain HTTP and no proxy is set for it, by the standard library's settings."""
    parts = urlsplit(endpoint)
    return (
        parts.scheme == "http"
        and endpoint.isascii()
        and (not getproxies().get("http") or bool(proxy_bypass(parts.hostname or "")))
    )


def size_of(headers: Headers) -> int:
    """The size of the whole object, from the headers of `DirectHTTP.get`."""
    return int(headers["content-range"].rpartition("/")[2])


def answer_of(headers: Headers) -> dict[str, Any]:
    """The headers as botocore would return them, as far as a `Stat` needs them."""
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
    """The connection ended before the first byte of a response."""


class DirectHTTP:
    """Connections to one server, on one event loop. `usable`: whether to ask it at all."""

    def __init__(self, connect_s: float, read_s: float) -> None:
        """Time-outs: seconds to connect, and seconds without a byte."""
        self._connect_s = connect_s
        self._read_s = read_s
        self._idle: list[_Connection] = []
        self._refusals = 0
        self._rests_until = 0.0

    @property
    def usable(self) -> bool:
        return asyncio.get_running_loop().time() >= self._rests_until

    async def get(self, url: str, start: int, into: Sequence[memoryview], clipped: bool = False) -> Headers | None:
        """Fill `into` with the object's bytes from `start` on, `clipped`: as far as it goes; returns the response's
        headers, names in lower case.

        None if the response is anything but these very bytes: ask again through the library. Raises Transient.
        Nothing is written to `into` after this returns, raises or is cancelled.
        """
        parts = urlsplit(url)
        stop = start + sum(len(view) for view in into)
        request = (
            f"GET {parts.path}?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\nAccept-Encoding: identity\r\n"
            f"Range: bytes={start}-{stop - 1}\r\n\r\n"
        ).encode("ascii")
        while self._idle:
            connection = self._idle.pop()
            if connection.alive:
                try:
                    return await self._ask(connection, request, start, stop, into, clipped)
                except _Stale:
                    break  # the server had closed it meanwhile
        connection = await self._connect(parts.hostname or "", parts.port or 80)
        try:
            return await self._ask(connection, request, start, stop, into, clipped)
        except _Stale:
            raise Transient(TIER, "get", "closed without a response") from None

    async def _connect(self, host: str, port: int) -> _Connection:
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await asyncio.get_running_loop().create_connection(_Connection, host, port)
        except (OSError, TimeoutError) as error:
            netloc = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            detail = unreachable(f"http://{netloc}", error)
            raise Transient(TIER, "connect", detail or type(error).__name__) from None
        return connection

    async def _ask(
        self, connection: _Connection, request: bytes, start: int, stop: int, into: Sequence[memoryview], clipped: bool
    ) -> Headers | None:
        try:
            status, headers = await connection.ask(request, start, stop, into, clipped, self._read_s)
        except BaseException:
            connection.abort()
            raise
        if headers is None:
            connection.abort()
            self._refusals += status < 500 and status not in _SERVER_ERRORS
            if self._refusals >= REFUSALS_MAX:
                self._refusals, self._rests_until = 0, asyncio.get_running_loop().time() + REST_S
            return None
        self._refusals = 0
        if headers.get("connection", "").lower() == "close":
            connection.abort()
        else:
            self._idle.append(connection)
        return headers

    def close(self) -> None:
        """Close idle connections. Idempotent."""
        while self._idle:
            self._idle.pop().abort()


class _Connection(asyncio.BufferedProtocol):
    """One connection: one request at a time, its body received into the caller's views."""

    def __init__(self) -> None:
        self.alive = True
        self._transport: asyncio.Transport | None = None
        self._head = bytearray(_HEAD_BYTES_MAX)
        self._filled = 0
        self._scatter = Scatter(())
        self._range = (0, 0, False)
        self._into: Sequence[memoryview] = ()
        self._headers: Headers | None = None
        self._answer: asyncio.Future[tuple[int, Headers | None]] | None = None
        self._received = 0
        self._timer: asyncio.TimerHandle | None = None

    async def ask(
        self, request: bytes, start: int, stop: int, into: Sequence[memoryview], clipped: bool, read_s: float
    ) -> tuple[int, Headers | None]:
        """Status and, if `into` is filled, headers. Raises _Stale or Transient; then `abort` it."""
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self._filled = self._received = 0
        self._headers, self._range, self._into = None, (start, stop, clipped), into
        answer: asyncio.Future[tuple[int, Headers | None]] = loop.create_future()
        self._answer = answer
        try:
            self._transport.write(request)
            self._watch(0, read_s)
            return await answer
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._answer, self._into = None, ()

    def _watch(self, received: int, read_s: float) -> None:
        """Check in `read_s` whether more than `received` bytes have come."""
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
        """Close at once; no buffer is written to any more."""
        self.alive = False
        self._scatter, self._into = Scatter(()), ()
        if self._transport is not None:
            self._transport.abort()

    # -- called by the transport -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's derives from none of asyncio's classes

    def connection_lost(self, exc: Exception | None) -> None:
        self.alive = False
        self._fail(Transient(TIER, "get", "body shorter than announced") if self._received else _Stale())

    def get_buffer(self, sizehint: int) -> memoryview:
        """Never an empty one, which a loop takes for a failure: it asks for one at the end of the connection, too, and
        uvloop does as soon as the last one is full."""
        if self._answer is None or self._answer.done():
            return memoryview(self._head)
        return memoryview(self._head)[self._filled :] if self._headers is None else self._scatter.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._received += nbytes
        if self._answer is None or self._answer.done():
            self.abort()  # more than was announced, or a response to nothing
        elif self._headers is not None:
            self._scatter.advance(nbytes)
            self._end_if_full()
        else:
            seen = self._filled
            self._filled += nbytes
            end = self._head.find(b"\r\n\r\n", max(0, seen - 3), self._filled)
            if end >= 0:
                self._begin(end)
            elif self._filled == len(self._head):
                self._answer.set_result((0, None))

    def _begin(self, end: int) -> None:
        """The head is whole: check that the body is the range that was requested."""
        assert self._answer is not None
        status, headers = _parse(bytes(self._head[:end]))
        found = _RANGE.fullmatch(headers.get("content-range", ""))
        start, stop, clipped = self._range
        if clipped and found is not None:
            stop = min(stop, int(found[3]))
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
        self._scatter = Scatter(clip(self._into, stop - start))
        rest = self._scatter.feed(memoryview(self._head)[end + 4 : self._filled])
        self._end_if_full()
        if len(rest):
            self.abort()

    def _end_if_full(self) -> None:
        if self._answer is not None and self._scatter.full:
            self._answer.set_result((206, self._headers))


def _parse(head: bytes) -> tuple[int, Headers]:
    """Status (0 if it is no HTTP/1.1) and headers."""
    line, *rest = head.decode("latin-1").split("\r\n")
    version, _, tail = line.partition(" ")
    status = int(tail[:3]) if version == "HTTP/1.1" and tail[:3].isascii() and tail[:3].isdigit() else 0
    return status, {name.strip().lower(): value.strip() for name, _, value in (each.partition(":") for each in rest)}
