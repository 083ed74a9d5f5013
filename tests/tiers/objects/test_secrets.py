"""What must not leak, and what must not be followed: links, redirects, credentials in URLs and options."""

from __future__ import annotations

import http.server
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvtier.config import Config
from kvtier.errors import ConfigError, TierError
from kvtier.testing import VirtualClock
from kvtier.tiers.objects.bucket.local import LocalFiles
from kvtier.tiers.objects.bucket.obstore import ObstoreBucket
from kvtier.tiers.objects.bucket.open import BucketLimits, Client, open_bucket


def test_a_temporary_file_follows_no_link_that_lies_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, victim = tmp_path / "g4", tmp_path / "victim"
    victim.write_bytes(b"precious")
    files = LocalFiles(root)
    files.start()
    opened: list[tuple[str, int]] = []
    well = os.open

    def spying(path: object, flags: int, *rest: int, **more: int) -> int:
        if flags & os.O_CREAT:
            opened.append((os.fspath(path), flags))  # type: ignore[call-overload]
        return well(path, flags, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", spying)
    for number in range(2):
        assert files.create(f"a/{number}", bytearray(b"data"), 1.0) is not None  # type: ignore[arg-type]
    names = [Path(path).name for path, _ in opened]
    assert len(set(names)) == 2 and not any(str(os.getpid()) in name.split("-") for name in names)
    assert all(flags & os.O_EXCL and flags & os.O_NOFOLLOW for _, flags in opened)
    for guess in (f".tmp-{os.getpid()}-clock", f".tmp-{os.getpid()}-{threading.get_ident()}-0"):
        (root / guess).symlink_to(victim)
        (root / "a" / guess).symlink_to(victim)
    files.start()
    assert files.create("a/0", bytearray(b"other"), 1.0) is None  # type: ignore[arg-type]
    assert files.replace("a/0", bytearray(b"other"), 1.0, None) is not None  # type: ignore[arg-type]
    assert victim.read_bytes() == b"precious"


def test_new_directories_are_for_their_owner_alone(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        files = LocalFiles(tmp_path / "g4")
        files.start()
        files.create("a/b/c", bytearray(b"data"), 1.0)  # type: ignore[arg-type]
    finally:
        os.umask(old)
    for folder in ("g4", "g4/a", "g4/a/b"):
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o700, folder


@pytest.mark.parametrize(
    "url",
    ["s3://key:top/secret@bucket/p", "file://user:top/secret@/p", "nosuch://key:top/secret@bucket", "s3:/k:top@b"],
)
def test_a_url_with_a_secret_is_not_printed(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_bucket(url, {}, "auto", VirtualClock(), BucketLimits())
    assert "top" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        Config.parse({"tiers": {"g4": {"url": url}}})
    assert "top" not in str(caught.value) and "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["s3://buck[et/p", "s3://b]/p", "gs://[b/p", "memory://[", "s3://b\u2100/p"])
def test_a_host_that_is_none_is_a_config_error_or_a_bucket_s_name(url: str) -> None:
    with suppress(ConfigError):
        open_bucket(url, {}, "auto", VirtualClock(), BucketLimits())


@pytest.mark.parametrize("name", ["user@domain", "why?x", "a#b", "a%20b", "[a"])
async def test_a_directory_has_neither_credentials_nor_a_query(tmp_path: Path, name: str) -> None:
    url = f"file://{tmp_path}/{name}"
    config = Config.parse({"tiers": {"g4": {"url": url}}})
    assert config.tiers.g4 is not None and config.tiers.g4.url == url
    bucket, _ = open_bucket(url, {}, "auto", VirtualClock(), BucketLimits())
    await bucket.start()
    await bucket.close()
    assert (tmp_path / name).is_dir()


def test_a_numeric_option_may_be_a_secret() -> None:
    options = {"password": 31415926, "pin": 2718.28, "region": "eu", "use_ssl": False, "client_kwargs": {"key": 777}}
    found = Config.parse({"tiers": {"g4": {"url": "memory://b/p", "options": options}}})
    shown = str(found.model_dump(mode="json")["tiers"]["g4"]["options"])
    assert not any(secret in shown for secret in ("31415926", "2718", "777"))
    assert "eu" in shown and "False" in shown


class _Redirecting(http.server.BaseHTTPRequestHandler):
    """Sends everybody to `target`; without one, it is the target, and takes notes."""

    target = ""
    seen: list[dict[str, str]] = []

    def _answer(self) -> None:
        if self.server.target:  # type: ignore[attr-defined]
            self.send_response(307)
            self.send_header("Location", self.server.target + self.path)  # type: ignore[attr-defined]
        else:
            self.server.seen.append(dict(self.headers))  # type: ignore[attr-defined]
            self.send_response(403)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def servers() -> Iterator[list[http.server.ThreadingHTTPServer]]:
    made = []
    for _ in range(2):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Redirecting)
        server.target, server.seen = "", []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        made.append(server)
    made[0].target = f"http://127.0.0.1:{made[1].server_port}"  # type: ignore[attr-defined]
    yield made
    for server in made:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("client", ["s3fs", "auto"])
async def test_a_redirect_does_not_carry_the_session_token_away(
    servers: list[http.server.ThreadingHTTPServer], client: Client
) -> None:
    endpoint = f"http://127.0.0.1:{servers[0].server_port}"
    options = {"key": "k", "secret": "s", "token": "topsecret", "endpoint_url": endpoint}
    bucket, _ = open_bucket("s3://bucket/p", options, client, VirtualClock(), BucketLimits(connect_s=1, read_s=1))
    await bucket.start()
    for work in (bucket.head("p/a"), bucket.create("p/a", bytearray(b"x"), 1.0), bucket.delete("p/a")):  # type: ignore[arg-type]
        with pytest.raises(TierError):
            await work
    await bucket.close()
    assert servers[1].seen == []  # type: ignore[attr-defined]


def test_obstore_is_refused_a_session_token_that_redirects_would_carry_away() -> None:
    endpoint = "http://127.0.0.1:9000"
    options = {"key": "k", "secret": "s", "token": "topsecret", "endpoint_url": endpoint}
    with pytest.raises(ConfigError, match="client: s3fs") as caught:
        open_bucket("s3://bucket/p", options, "obstore", VirtualClock(), BucketLimits())
    assert "topsecret" not in str(caught.value)


@pytest.mark.parametrize("client", ["s3fs", "auto", "obstore"])
async def test_nor_a_token_of_the_clients_own_chain(
    servers: list[http.server.ThreadingHTTPServer], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ACCESS_KEY_ID", "k"), ("SECRET_ACCESS_KEY", "s"), ("SESSION_TOKEN", "topsecret")):
        monkeypatch.setenv(f"AWS_{name}", value)
    options = {"endpoint_url": f"http://127.0.0.1:{servers[0].server_port}"}
    bucket, _ = open_bucket("s3://bucket/p", options, client, VirtualClock(), BucketLimits(connect_s=1, read_s=1))
    await bucket.start()
    for work in (bucket.head("p/a"), bucket.create("p/a", bytearray(b"x"), 1.0), bucket.delete("p/a")):  # type: ignore[arg-type]
        with pytest.raises(TierError):
            await work
    await bucket.close()
    assert servers[1].seen == []  # type: ignore[attr-defined]


async def test_obstore_alone_does_not_start_with_such_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ACCESS_KEY_ID", "k"), ("SECRET_ACCESS_KEY", "s"), ("SESSION_TOKEN", "topsecret")):
        monkeypatch.setenv(f"AWS_{name}", value)
    config = {"endpoint": "http://127.0.0.1:9000"}
    bucket = ObstoreBucket("bucket", config, connect_timeout_s=1, read_timeout_s=1)
    with pytest.raises(ConfigError, match="client: s3fs") as caught:
        await bucket.start()
    assert "topsecret" not in str(caught.value)
    monkeypatch.delenv("AWS_SESSION_TOKEN")
    await bucket.start()
    await bucket.close()
