"""An S3 server that fails on demand: just enough of the protocol for kvtier's clients, and faults by rule and seed.

In memory, on loopback, on a thread of its own, without any check of signatures. For tests of clients only.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from enum import StrEnum
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_DRIP_S = 0.05
_HEADERS_MAX = 1 << 16
_BODY_MAX = 1 << 30


class S3Fault(StrEnum):
    """A fault of one request. The verb is carried out first only where the name says so."""

    STATUS_500 = "500 InternalError"
    STATUS_502 = "502 with a proxy's HTML page"
    STATUS_503 = "503 SlowDown"
    STATUS_504 = "504 without a body"
    STATUS_507 = "507 InsufficientStorage"
    STATUS_429 = "429 TooManyRequests"
    STATUS_409 = "409 ConditionalRequestConflict"
    STATUS_412 = "412 although no condition failed"
    STATUS_404 = "404 although it is there"
    STATUS_403 = "403 AccessDenied"
    EXPIRED = "400 ExpiredToken"
    SKEWED = "403 RequestTimeTooSkewed"
    REDIRECT = "301 PermanentRedirect without a place to go"
    REDIRECT_LOOP = "307 to itself"
    ERROR_200 = "200 with an error document as its body"
    EMPTY_200 = "200 with nothing"
    RESET = "connection reset before the answer"
    DONE_RESET = "carried out, then reset before the answer"
    FALSE_ACK = "200 although nothing was done"
    STALL = "no answer, ever"
    STALL_BODY = "half of the body, then silence"
    SLOW_BODY = "a body that drips"
    PARTIAL_BODY = "half of the body, then the connection closes"
    SHORT_LENGTH = "Content-Length smaller than requested"
    WRONG_ETAG = "another version's ETag"
    WRONG_RANGE = "other bytes than requested, with their own Content-Range"
    SHIFTED = "other bytes than requested, labelled as the right ones"
    FLIPPED = "one bit of the body flipped"
    GARBAGE = "no HTTP at all"


@dataclass(frozen=True, slots=True)
class S3Rule:
    """`fault` hits requests of `verb` (get, put, head, list, delete, copy, *) at `rate`, at most `times` times."""

    verb: str
    fault: S3Fault
    rate: float = 1.0
    times: int | None = None


@dataclass(slots=True)
class _Object:
    data: bytes
    etag: str
    metadata: dict[str, str]
    modified: float


@dataclass(slots=True)
class _Request:
    method: str
    name: str  # bucket/key, unquoted
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes

    @property
    def verb(self) -> str:
        if self.method == "POST":
            return "delete"
        if self.method == "PUT":
            return "copy" if "x-amz-copy-source" in self.headers else "put"
        if self.method == "GET" and ("list-type" in self.query or "/" not in self.name.strip("/")):
            return "list"
        return self.method.lower()


@dataclass(slots=True)
class _Answer:
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class FaultyS3:
    """The server. `rules` may be changed at any time; `hits` counts faults, `requests` verbs."""

    def __init__(self, seed: int = 0) -> None:
        self.rules: list[S3Rule] = []
        self.hits: Counter[S3Rule] = Counter()
        self.requests: Counter[str] = Counter()
        self.objects: dict[str, _Object] = {}
        self._random = random.Random(seed)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._port = 0
        self._versions = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def options(self) -> dict[str, object]:
        """fsspec options (s3fs) of this server."""
        region = {"region_name": "us-east-1"}
        return {"endpoint_url": self.endpoint, "key": "k", "secret": "s", "client_kwargs": region}

    @contextmanager
    def running(self) -> Iterator[FaultyS3]:
        """Serve inside a `with`."""
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), name="faulty-s3", daemon=True)
        self._thread.start()
        ready.wait(10)
        try:
            yield self
        finally:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)

    def _serve(self, ready: threading.Event) -> None:
        self._loop = loop = asyncio.new_event_loop()
        server = loop.run_until_complete(asyncio.start_server(self._connection, "127.0.0.1", 0, limit=_HEADERS_MAX))
        self._port = server.sockets[0].getsockname()[1]
        loop.call_soon(ready.set)
        loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()

    # -- the protocol ---------------------------------------------------------------------------------------------

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await self._request(reader, writer)) is not None:
                self.requests[request.verb] += 1
                if not await self._respond(request, writer):
                    break
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        except asyncio.CancelledError:
            pass  # the server ends: asyncio would log a traceback for each open connection
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Request | None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        line, *rest = head.decode("latin-1").split("\r\n")
        method, target, _ = line.split(" ", 2)
        headers = {k.strip().lower(): v.strip() for k, _, v in (item.partition(":") for item in rest if item)}
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        length = min(int(headers.get("content-length", "0")), _BODY_MAX)
        body = await reader.readexactly(length) if length else b""
        parts = urlsplit(target)
        query = parse_qs(parts.query, keep_blank_values=True)
        return _Request(method, unquote(parts.path).lstrip("/"), query, headers, body)

    async def _respond(self, request: _Request, writer: asyncio.StreamWriter) -> bool:
        """Answer one request, with what the rules make of it; whether the connection lives on."""
        fault = self._strike(request.verb)
        if fault is S3Fault.STALL:
            await asyncio.sleep(3600)
        if fault in (S3Fault.RESET, S3Fault.DONE_RESET):
            if fault is S3Fault.DONE_RESET:
                self._carry_out(request)
            writer.transport.abort()
            return False
        if fault is S3Fault.GARBAGE:
            writer.write(b"\x00\x01 this is no HTTP \r\n\r\n")
            return False
        canned = _canned(fault, request)
        answer = canned if canned is not None else self._bent(fault, request, self._carry_out(request))
        await self._send(fault, request, answer, writer)
        return fault not in (S3Fault.PARTIAL_BODY, S3Fault.SHORT_LENGTH)

    def _strike(self, verb: str) -> S3Fault | None:
        for rule in self.rules:
            left = rule.times is None or self.hits[rule] < rule.times
            if rule.verb in (verb, "*") and left and self._random.random() < rule.rate:
                self.hits[rule] += 1
                return rule.fault
        return None

    async def _send(
        self, fault: S3Fault | None, request: _Request, answer: _Answer, writer: asyncio.StreamWriter
    ) -> None:
        body = b"" if request.method == "HEAD" else answer.body
        length = len(answer.body)
        if fault is S3Fault.SHORT_LENGTH and body:
            body = body[: len(body) // 2]
            length = len(body)
        head = {"Date": formatdate(usegmt=True), "Server": "faulty", "Content-Length": str(length), **answer.headers}
        lines = [f"HTTP/1.1 {answer.status} X", *(f"{name}: {value}" for name, value in head.items())]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        half = len(body) // 2
        if fault in (S3Fault.STALL_BODY, S3Fault.PARTIAL_BODY) and body:
            writer.write(body[:half])
            await writer.drain()
            if fault is S3Fault.STALL_BODY:
                await asyncio.sleep(3600)
            return
        if fault is S3Fault.SLOW_BODY and body:
            step = max(1, len(body) // 64)
            for start in range(0, len(body), step):
                writer.write(body[start : start + step])
                await writer.drain()
                await asyncio.sleep(_DRIP_S)
            return
        writer.write(body)
        await writer.drain()

    def _bent(self, fault: S3Fault | None, request: _Request, answer: _Answer) -> _Answer:
        if fault is S3Fault.WRONG_ETAG and "ETag" in answer.headers:
            answer.headers["ETag"] = '"0123456789abcdef0123456789abcdef"'
        if fault is S3Fault.FLIPPED and answer.body:
            raw = bytearray(answer.body)
            raw[self._random.randrange(len(raw))] ^= 1 << self._random.randrange(8)
            answer.body = bytes(raw)
        there = self.objects.get(request.name)
        if fault in (S3Fault.SHIFTED, S3Fault.WRONG_RANGE) and there is not None and request.verb == "get":
            first, last = _range(request.headers.get("range"), len(there.data))
            shift = 512 if last + 512 < len(there.data) else -min(512, first)
            answer.body = there.data[first + shift : last + 1 + shift]
            if fault is S3Fault.WRONG_RANGE:
                answer.headers["Content-Range"] = f"bytes {first + shift}-{last + shift}/{len(there.data)}"
        return answer

    # -- the store ------------------------------------------------------------------------------------------------

    def _carry_out(self, request: _Request) -> _Answer:
        handler = getattr(self, f"_do_{request.verb}", None)
        return handler(request) if handler is not None else _error(405, "MethodNotAllowed")

    def _do_put(self, request: _Request) -> _Answer:
        if "/" not in request.name.strip("/"):
            return _Answer(200)  # a bucket
        refused = self._precondition(request)
        if refused is not None:
            return refused
        metadata = {k: v for k, v in request.headers.items() if k.startswith("x-amz-meta-")}
        etag = f'"{hashlib.md5(request.body, usedforsecurity=False).hexdigest()}"'
        self.objects[request.name] = _Object(request.body, etag, metadata, time.time())
        return _Answer(200, {"ETag": etag})

    def _do_copy(self, request: _Request) -> _Answer:
        source = self.objects.get(unquote(request.headers["x-amz-copy-source"]).lstrip("/"))
        if source is None:
            return _error(404, "NoSuchKey")
        wanted = request.headers.get("x-amz-copy-source-if-match")
        if wanted is not None and wanted != source.etag:
            return _error(412, "PreconditionFailed")
        metadata = {k: v for k, v in request.headers.items() if k.startswith("x-amz-meta-")}
        self.objects[request.name] = _Object(source.data, source.etag, metadata, time.time())
        return _xml(f"<CopyObjectResult><ETag>{escape(source.etag)}</ETag></CopyObjectResult>")

    def _do_head(self, request: _Request) -> _Answer:
        return self._do_get(request)

    def _do_get(self, request: _Request) -> _Answer:
        there = self.objects.get(request.name)
        if there is None:
            return _error(404, "NoSuchKey")
        headers = {
            "ETag": there.etag,
            "Last-Modified": formatdate(there.modified, usegmt=True),
            "Accept-Ranges": "bytes",
            **there.metadata,
        }
        if "range" not in request.headers:
            return _Answer(200, headers, there.data)
        first, last = _range(request.headers["range"], len(there.data))
        if first >= len(there.data):
            return _error(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {first}-{last}/{len(there.data)}"
        return _Answer(206, headers, there.data[first : last + 1])

    def _do_list(self, request: _Request) -> _Answer:
        bucket = request.name.strip("/")
        prefix = request.query.get("prefix", [""])[0]
        after = request.query.get("continuation-token", request.query.get("start-after", [""]))[0]
        limit = int(request.query.get("max-keys", ["1000"])[0])
        names = sorted(name.removeprefix(f"{bucket}/") for name in self.objects if name.startswith(f"{bucket}/"))
        names = [name for name in names if name.startswith(prefix) and name > after]
        page, more = names[:limit], len(names) > limit
        entries = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(self.objects[f'{bucket}/{name}'].data)}</Size>"
            f"<ETag>{escape(self.objects[f'{bucket}/{name}'].etag)}</ETag>"
            f"<LastModified>{_iso(self.objects[f'{bucket}/{name}'].modified)}</LastModified></Contents>"
            for name in page
        )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        return _xml(
            f"<ListBucketResult><Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"
            f"<MaxKeys>{limit}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>{token}{entries}</ListBucketResult>"
        )

    def _do_delete(self, request: _Request) -> _Answer:
        if request.method == "POST":
            names = [part.partition("</Key>")[0] for part in request.body.decode().split("<Key>")[1:]]
            for name in names:
                self.objects.pop(f"{request.name.strip('/')}/{name}", None)
            return _xml("<DeleteResult></DeleteResult>")
        if request.name not in self.objects:
            return _Answer(204)
        refused = self._precondition(request)
        if refused is not None:
            return refused
        del self.objects[request.name]
        return _Answer(204)

    def _precondition(self, request: _Request) -> _Answer | None:
        there = self.objects.get(request.name)
        if request.headers.get("if-none-match") == "*" and there is not None:
            return _error(412, "PreconditionFailed")
        wanted = request.headers.get("if-match")
        if wanted is not None and there is None:
            return _error(404, "NoSuchKey")
        if wanted is not None and there is not None and wanted != there.etag:
            return _error(412, "PreconditionFailed")
        return None


_CANNED = {
    S3Fault.STATUS_500: (500, "InternalError"),
    S3Fault.STATUS_503: (503, "SlowDown"),
    S3Fault.STATUS_507: (507, "InsufficientStorage"),
    S3Fault.STATUS_429: (429, "TooManyRequests"),
    S3Fault.STATUS_409: (409, "ConditionalRequestConflict"),
    S3Fault.STATUS_412: (412, "PreconditionFailed"),
    S3Fault.STATUS_404: (404, "NoSuchKey"),
    S3Fault.STATUS_403: (403, "AccessDenied"),
    S3Fault.EXPIRED: (400, "ExpiredToken"),
    S3Fault.SKEWED: (403, "RequestTimeTooSkewed"),
    S3Fault.REDIRECT: (301, "PermanentRedirect"),
    S3Fault.ERROR_200: (200, "InternalError"),
}


def _canned(fault: S3Fault | None, request: _Request) -> _Answer | None:
    """The answer that needs no look at the store; None if the verb is carried out."""
    if fault in _CANNED:
        return _error(*_CANNED[fault])
    if fault is S3Fault.STATUS_502:
        return _Answer(502, {"Content-Type": "text/html"}, b"<html><body>Bad Gateway</body></html>")
    if fault is S3Fault.STATUS_504:
        return _Answer(504)
    if fault is S3Fault.REDIRECT_LOOP:
        return _Answer(307, {"Location": f"/{request.name}"})
    if fault in (S3Fault.EMPTY_200, S3Fault.FALSE_ACK):
        return _Answer(200, {"ETag": '"d41d8cd98f00b204e9800998ecf8427e"'})
    return None


def _error(status: int, code: str) -> _Answer:
    text = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>injected</Message></Error>'
    return _Answer(status, {"Content-Type": "application/xml"}, text.encode())


def _xml(text: str) -> _Answer:
    return _Answer(200, {"Content-Type": "application/xml"}, f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode())


def _iso(wall: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(wall))


def _range(header: str | None, size: int) -> tuple[int, int]:
    """First and last byte; the whole object without a header."""
    if header is None:
        return 0, size - 1
    first, _, last = header.removeprefix("bytes=").partition("-")
    return int(first), min(int(last) if last else size - 1, size - 1)


def every_fault(verbs: Sequence[str] = ("get", "put", "head", "list", "delete", "copy")) -> list[tuple[str, S3Fault]]:
    """All pairs, in a fixed order."""
    return [(verb, fault) for verb in verbs for fault in S3Fault]
