"""Errors of a server that cannot be talked to, and of one that sends its clients elsewhere."""

from __future__ import annotations

import asyncio
import http.server
import socket
import ssl
import threading
from collections.abc import Iterator

import pytest

from kvtier.errors import TierError
from kvtier.testing import VirtualClock
from kvtier.testing.servers import S3Server
from kvtier.tiers.objects.bucket.endpoint import refused, shown, unreachable
from kvtier.tiers.objects.bucket.open import BucketLimits, Client, open_bucket
from kvtier.tiers.objects.bucket.protocol import Transient

OPTIONS = {"key": "k", "secret": "topsecret"}
LIMITS = BucketLimits(connect_s=1, read_s=1)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://minio:9000", "http://minio:9000"),
        ("https://key:topsecret@s3.example.org/path?x=topsecret", "https://s3.example.org"),
        ("http://[::1]:9000", "http://[::1]:9000"),
        ("http://minio:topsecret", "an endpoint that is no URL"),
        ("", "the provider's own endpoint"),
    ],
)
def test_an_endpoint_is_shown_without_secrets(url: str, text: str) -> None:
    assert shown(url) == text


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ConnectionRefusedError(111, "topsecret"), "connection refused"),
        (socket.gaierror(-2, "topsecret"), "host name not known"),
        (ssl.SSLCertVerificationError("topsecret"), "certificate not trusted"),
        (TimeoutError("topsecret"), "no answer in time"),
        (RuntimeError("HTTP error: error sending request: tcp connect: Connection refused"), "connection refused"),
    ],
)
def test_the_cause_is_told_in_our_words(error: Exception, cause: str) -> None:
    outer = ValueError("topsecret")
    outer.__cause__ = error
    for each in (error, outer):
        assert unreachable("http://minio:9000", each) == f"http://minio:9000: {cause} (tiers.g4.options.endpoint_url)"


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("NoSuchBucket", "no such bucket (tiers.g4.url)"),
        ("SignatureDoesNotMatch", "the secret does not belong to the access key (tiers.g4.options.secret)"),
        ("InvalidAccessKeyId", "this access key is not known (tiers.g4.options.key)"),
        ("403", "access denied (tiers.g4.options.key and secret, or the bucket's policy)"),
        ("NoSuchKey", None),
        ("SlowDown", None),
    ],
)
def test_a_refusal_names_the_setting(code: str, cause: str | None) -> None:
    wanted = None if cause is None else f"http://minio:9000: {cause}"
    assert refused("http://minio:9000", ValueError("topsecret"), code) == wanted
    said = RuntimeError(f"status code: {code} Forbidden: <Error><Code>{code}</Code><Message>topsecret</Message>")
    assert refused("http://minio:9000", said) == wanted


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ({"secret": "wrong"}, "the secret does not belong to the access key (tiers.g4.options.secret)"),
        ({"key": "wrong"}, "this access key is not known (tiers.g4.options.key)"),
        ({}, "no such bucket (tiers.g4.url)"),
        ({"endpoint_url": "https"}, "no TLS at this port (tiers.g4.options.endpoint_url)"),
    ],
)
async def test_what_a_newcomer_gets_wrong_is_named(
    client: Client, wrong: dict[str, str], cause: str, seaweedfs: S3Server
) -> None:
    options = {**seaweedfs.options, **wrong}
    if "endpoint_url" in wrong:
        options["endpoint_url"] = endpoint = seaweedfs.endpoint.replace("http:", "https:")
    else:
        endpoint = seaweedfs.endpoint
    bucket, _ = open_bucket("s3://nobody-made-this/p", options, client, VirtualClock(), LIMITS)
    await bucket.start()
    with pytest.raises(TierError) as caught:
        [page async for page in bucket.list("p/")]
    await bucket.close()
    assert f"{endpoint}: {cause}" in str(caught.value) and "wrong" not in str(caught.value)


def test_an_answer_is_no_fault_of_the_connection() -> None:
    assert unreachable("http://minio:9000", RuntimeError("403: certificate expired, topsecret")) is None
    assert unreachable("http://minio:9000", ValueError()) is None


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
@pytest.mark.parametrize("verb", ["head", "create", "read", "list"])
async def test_a_server_that_is_down_is_named_with_the_cause(client: Client, verb: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: nobody else gets the port
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        options = {**OPTIONS, "endpoint_url": endpoint}
        bucket, _ = open_bucket("s3://bucket/p", options, client, VirtualClock(), LIMITS)
        await bucket.start()
        with pytest.raises(Transient) as caught:
            match verb:
                case "head":
                    await bucket.head("p/a")
                case "create":
                    await bucket.create("p/a", bytearray(b"x"), 1.0)  # type: ignore[arg-type]
                case "read":
                    await bucket.read("p/a", 0, [memoryview(bytearray(1 << 16))])
                case _:
                    [page async for page in bucket.list("p/")]
        await bucket.close()
    assert f"{endpoint}: connection refused (tiers.g4.options.endpoint_url)" in str(caught.value)
    assert "topsecret" not in str(caught.value)


class _Elsewhere(http.server.BaseHTTPRequestHandler):
    """Tells everybody that the bucket is in another region, but not in which."""

    def _answer(self) -> None:
        self.server.asked.append(self.command)  # type: ignore[attr-defined]
        self.send_response(301)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def elsewhere() -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Elsewhere)
    server.asked = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


async def test_the_search_for_a_region_is_bounded(elsewhere: http.server.ThreadingHTTPServer) -> None:
    """Each request is sent once, and all together search once a minute."""
    clock = VirtualClock()
    options = {**OPTIONS, "endpoint_url": f"http://127.0.0.1:{elsewhere.server_port}"}
    bucket, _ = open_bucket("s3://bucket/p", options, "s3fs", clock, LIMITS)
    await bucket.start()
    asked: list[str] = elsewhere.asked  # type: ignore[attr-defined]
    for sent in (4, 7):
        for _ in range(3):
            with pytest.raises(TierError):
                await bucket.head("p/a")
        assert len(asked) <= sent, asked
    clock.advance(61)
    del asked[:]
    for _ in range(3):
        with pytest.raises(TierError):
            await bucket.head("p/a")
    assert len(asked) == 4
    await asyncio.wait_for(bucket.close(), 5)
