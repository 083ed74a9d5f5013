"""Ranged GETs without a client library: the very bytes, or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvtier.testing import VirtualClock, chain_of, payload_of, sample_namespace, seal
from kvtier.testing.faults_s3 import FaultyS3
from kvtier.tiers.objects.bucket.direct_http import REFUSALS_MAX, DirectHTTP, reachable, size_of
from kvtier.tiers.objects.bucket.protocol import Transient
from kvtier.tiers.objects.tier import ObjectTier
from kvtier.tiers.protocol import Loaded, Target
from tests.support.waiting import WAIT_S, until

DATA = bytes(range(256)) * 1024
START, COUNT = 1000, 200_000

Part = bytes | float | asyncio.Event | None
Answer = Callable[[int, int], Sequence[Part]]
"""Sent by a server for a range: bytes, a pause in seconds or until an event, or None for the end of the connection."""


def head(first: int, last: int, status: str = "206 Partial Content", **headers: object) -> bytes:
    given = {"Content-Range": f"bytes {first}-{last}/{len(DATA)}", "Content-Length": last - first + 1, "ETag": '"e"'}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{name}: {value}" for name, value in given.items() if value is not None]
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode()


def good(first: int, last: int) -> list[Part]:
    return [head(first, last) + DATA[first : last + 1]]


class Server:
    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.connections = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while request := await reader.readuntil(b"\r\n\r\n"):
                span = request.partition(b"bytes=")[2].split(b"\r\n")[0]
                first, last = (int(each) for each in span.split(b"-"))
                answer = self.answers.pop(0) if self.answers else good
                for part in answer(first, last):
                    if part is None:
                        return
                    if isinstance(part, float):
                        await asyncio.sleep(part)
                    elif isinstance(part, asyncio.Event):
                        await part.wait()
                    else:
                        writer.write(part)
                        await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def running(read_s: float = WAIT_S) -> AsyncIterator[tuple[Server, DirectHTTP]]:
    """No connection's protocol may fail: the loop would report it, and close the connection."""
    server, failed = Server(), list[dict[str, Any]]()

    def report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        failed.extend([context] if "protocol" in context else [])
        loop.default_exception_handler(context)

    asyncio.get_running_loop().set_exception_handler(report)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/b/x?signature=s"
    direct = DirectHTTP(connect_s=WAIT_S, read_s=read_s)
    try:
        yield server, direct
    finally:
        direct.close()
        listening.close()
        await asyncio.sleep(0)
    assert not failed, failed[0]


def views(*sizes: int) -> tuple[list[bytearray], list[memoryview]]:
    buffers = [bytearray(size) for size in sizes]
    return buffers, [memoryview(buffer) for buffer in buffers]


async def fetch(server: Server, direct: DirectHTTP) -> dict[str, str] | None:
    buffers, into = views(COUNT // 4, COUNT // 2, COUNT // 4)
    headers = await direct.get(server.url, START, into)
    assert headers is None or b"".join(buffers) == DATA[START : START + COUNT], "wrong bytes"
    return headers


async def test_bytes_come_in_any_pieces_over_one_connection() -> None:
    def drip(first: int, last: int) -> list[Part]:
        whole = good(first, last)[0]
        assert isinstance(whole, bytes)
        return [whole[:10], 0.01, whole[10:150], 0.01, whole[150:70_000], 0.01, whole[70_000:]]

    async with running() as (server, direct):
        server.answers = [good, drip, good]
        for _ in range(3):
            headers = await fetch(server, direct)
            assert headers is not None and headers["etag"] == '"e"' and size_of(headers) == len(DATA)
        assert server.connections == 1


async def test_a_connection_that_was_closed_while_idle_is_replaced_at_once() -> None:
    async with running() as (server, direct):
        server.answers = [lambda first, last: [*good(first, last), None], lambda first, last: [None], good]
        assert await fetch(server, direct) is not None
        await asyncio.sleep(0.05)
        with pytest.raises(Transient):  # a new one, and the server closes that one, too
            await fetch(server, direct)
        assert await fetch(server, direct) is not None


@pytest.mark.parametrize(
    "answer",
    [
        lambda first, last: [head(first, last, status="200 OK") + DATA[first : last + 1]],
        lambda first, last: [head(first, last, Content_Range=None) + DATA[first : last + 1]],
        lambda first, last: [head(first + 1, last + 1) + DATA[first + 1 : last + 2]],
        lambda first, last: [head(first, last, Content_Length=last - first) + DATA[first:last]],
        lambda first, last: [head(first, last, Transfer_Encoding="chunked")],
        lambda first, last: [head(first, last, Content_Encoding="gzip") + DATA[first : last + 1]],
        lambda first, last: [b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"],
        lambda first, last: [b"SSH-2.0-hello\r\n\r\n"],
        lambda first, last: [b"x" * 100_000],
    ],
)
async def test_any_other_answer_is_none_of_its_business(answer: Answer) -> None:
    async with running() as (server, direct):
        server.answers = [answer]
        assert await fetch(server, direct) is None
        assert await fetch(server, direct) is not None, "on a connection of its own"


async def test_after_enough_refusals_it_gives_up() -> None:
    async with running() as (server, direct):
        server.answers = [lambda first, last: [head(first, last, status="200 OK")]] * REFUSALS_MAX
        for _ in range(REFUSALS_MAX):
            assert direct.usable and await fetch(server, direct) is None
        assert not direct.usable


@pytest.mark.parametrize(
    "answer",
    [
        lambda first, last: [None],
        lambda first, last: [head(first, last) + DATA[first : first + 50_000], None],
        lambda first, last: [head(first, last) + DATA[first : first + 50_000], WAIT_S],
        lambda first, last: [WAIT_S],
    ],
)
async def test_what_breaks_off_or_stalls_may_be_tried_again(answer: Answer) -> None:
    async with running(read_s=0.3) as (server, direct):
        server.answers = [answer]
        with pytest.raises(Transient):
            await fetch(server, direct)
        direct._read_s = WAIT_S
        assert await fetch(server, direct) is not None


async def test_more_than_was_announced_reaches_nobody() -> None:
    async with running() as (server, direct):
        server.answers = [lambda first, last: [*good(first, last), b"and more"]]
        assert await fetch(server, direct) is not None
        await asyncio.sleep(0.05)
        assert await fetch(server, direct) is not None
        assert server.connections == 2, "the first one cannot be trusted any more"


async def test_a_cancelled_get_writes_nothing_afterwards() -> None:
    async with running() as (server, direct):
        half, cancelled = COUNT // 2, asyncio.Event()
        server.answers = [
            lambda first, last: [
                head(first, last) + DATA[first : first + half],
                cancelled,
                DATA[first + half : last + 1],
            ]
        ]
        buffers, into = views(COUNT)
        task = asyncio.create_task(direct.get(server.url, START, into))
        await until(lambda: buffers[0][:half] == DATA[START : START + half], "the control: some come")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        buffers[0][:] = bytes(COUNT)
        cancelled.set()
        await asyncio.sleep(0.15)
        assert not any(buffers[0])


def test_only_plain_endpoints_without_a_proxy_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert reachable("http://127.0.0.1:8333") and not reachable("https://s3.amazonaws.com")
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    assert not reachable("http://store:8333")
    monkeypatch.setenv("no_proxy", "store")
    assert reachable("http://store:8333")


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
async def test_a_tier_reads_its_blocks_this_way(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    original = DirectHTTP.get

    async def counting(self: DirectHTTP, url: str, start: int, into: list[memoryview], clipped: bool) -> object:
        taken.append(sum(map(len, into)))
        return await original(self, url, start, into, clipped)

    monkeypatch.setattr(DirectHTTP, "get", counting)
    ns, clock = sample_namespace(32 << 10), VirtualClock()
    with FaultyS3().running() as server:
        tier = ObjectTier("s3://bucket", ns, clock=clock, options=server.options, client=client, stride=4)  # type: ignore[arg-type]
        await tier.open()
        chain = chain_of(ns, 8)
        await tier.write(seal(chain, range(8), ns.block_bytes, clock.wall()), clock.monotonic() + 30)
        buffers, into = views(*[ns.block_bytes] * 8)
        targets = [Target(index, (view,)) for index, view in enumerate(into)]
        results = await tier.read(chain, targets, clock.monotonic() + 30)
        assert all(isinstance(result, Loaded) for result in results)
        assert [bytes(buffer) for buffer in buffers] == [payload_of(key, ns.block_bytes) for key in chain]
        assert taken == [4 * ns.block_bytes] * 2
        await tier.close(clock.monotonic() + 5)


@pytest.mark.parametrize(
    "scenario",
    [
        test_bytes_come_in_any_pieces_over_one_connection,
        test_a_connection_that_was_closed_while_idle_is_replaced_at_once,
        test_more_than_was_announced_reaches_nobody,
        test_a_cancelled_get_writes_nothing_afterwards,
    ],
)
def test_it_runs_on_uvloop(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
async def test_a_tier_of_a_program_that_uses_uvloop_reads(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang sets it as the policy, and so the tier's own loop is one of its."""
    monkeypatch.setattr(asyncio, "new_event_loop", pytest.importorskip("uvloop").new_event_loop)
    await test_a_tier_reads_its_blocks_this_way(client, monkeypatch)
