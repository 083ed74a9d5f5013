"""A running cache tells its requests to whoever records them: times, lengths and blocks, and nothing else."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib
import io
import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvtier
from kvtier.bench.retention.recording import RecordedChains, Recording
from kvtier.bench.retention.traces import load_trace
from kvtier.cli.trace import convert, record
from kvtier.cli.trace_socket import SocketSilent
from kvtier.clock import SystemClock
from kvtier.config import Config
from kvtier.errors import ClosedError, FormatError, InvalidRequest
from kvtier.identity.keys import BlockKey
from kvtier.request_trace import LISTENERS_MAX, WAITING_BLOCKS_MAX, WAITING_MAX, RequestTrace, _Listener, _Seen
from kvtier.supervisor import Supervisor
from kvtier.testing import payloads_of
from tests.support.trace_socket import NS, listening_cache
from tests.support.waiting import eventually

SALT, TOKEN = "tenant-canary-71", 0x5EC2E7


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.sock"


@pytest.fixture
def cache(path: Path) -> Iterator[kvtier.Cache]:
    with listening_cache(path) as cache:
        yield cache


@pytest.fixture
def recorded(cache: kvtier.Cache, path: Path, tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """Records; ends the recording when it is called, by closing the cache, and returns the file."""
    out = tmp_path / "out.jsonl"
    assert eventually(path.exists)
    thread = threading.Thread(target=record, args=(path, out), kwargs={"json": True})
    thread.start()
    assert eventually(lambda: bool(cache.trace._listeners))

    def end() -> Path:
        with contextlib.suppress(ClosedError):
            cache.submit(asyncio.sleep(0)).result(10)  # behind what was recorded so far
        assert eventually(lambda: not any(listener.waiting for listener in cache.trace._listeners))
        cache.close()
        thread.join(30)
        return out

    yield end
    end()


def ask(cache: kvtier.Cache, tokens: list[int], salt: str | None = None) -> None:
    keys = cache.chain_hashes(tokens, salt)
    with cache.get(keys) as hit:
        found = len(hit)
    cache.put(keys, payloads_of(keys, 4096)[found:], start=found)


def test_a_recording_gives_the_traffic_and_plan_reads_it(
    cache: kvtier.Cache, recorded: Callable[[], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [list(range(64)), list(range(128)), [9, *range(1, 64)], list(range(96))]
    for prompt in prompts:
        ask(cache, prompt)
    trace = load_trace(recorded())
    assert (trace.format, trace.block_tokens, trace.unique) == ("kvtier", 16, 12)
    assert [request.input_tokens for request in trace.requests] == [64, 128, 64, 96]
    first, second, other, third = (request.blocks for request in trace.requests)
    assert second[:4] == first and third == second[:6] and not set(other) & set(second)
    assert json.loads(capsys.readouterr().out)["requests"] == 4


def test_what_another_user_listens_with_is_not_believed(
    cache: kvtier.Cache, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its namespace would be the one that a purge is made in, while the tenant's blocks stay."""
    cli = importlib.import_module("kvtier.cli.trace_socket")
    assert cli.told_namespace(path)
    user = [4321]
    monkeypatch.setattr(cli, "user_of", lambda connection: user[0], raising=False)
    for own, shared, believed in ((1000, False, False), (1000, True, False), (0, True, False), (0, False, True)):
        monkeypatch.setattr(os, "geteuid", lambda own=own: own)
        path.parent.chmod(0o1777 if shared else 0o755)
        if believed:
            assert cli.told_namespace(path)
        else:
            with pytest.raises(cli.SocketSilent, match="user 4321 listens there"):
                cli.told_namespace(path)
    user[0] = 0
    assert cli.told_namespace(path)


def test_nothing_of_prompts_salts_and_keys_is_in_it(cache: kvtier.Cache, path: Path, recorded: Any) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    heard = socket.socket(socket.AF_UNIX)
    heard.connect(str(path))
    assert eventually(lambda: len(cache.trace._listeners) == 2)
    tokens = [TOKEN + number for number in range(64)]
    ask(cache, tokens, SALT)
    keys = cache.chain_hashes(tokens, SALT)
    told = recorded().read_bytes()
    while part := heard.recv(1 << 16):
        told += part
    heard.close()
    ids = [base64.b64decode(json.loads(line)["ids"]) for line in told.splitlines() if b'"ids"' in line]
    assert len(ids) == 1 and len(ids[0]) == 4 * 8, "it was told"
    told += ids[0]
    for secret in [*keys, *(key[16:] for key in keys), SALT.encode(), str(TOKEN).encode()]:
        for form in (secret, secret.hex().encode(), base64.b64encode(secret)[:-3]):
            assert form not in told
            assert not any(secret[start : start + 6] in told for start in range(len(secret) - 5))


def test_who_does_not_listen_costs_nothing_and_who_does_not_read_is_missed_not_waited_for() -> None:
    trace = RequestTrace(None, 16, SystemClock())
    trace.record([], 5)
    listener = _Listener()
    trace._listeners.add(listener)
    for _ in range(WAITING_MAX + 3):
        trace._tell(_Seen(1.0, 5, 0, ()))
    assert (len(listener.waiting), listener.missed) == (WAITING_MAX, 3)


def test_what_waits_for_a_listener_is_bounded_by_its_blocks_too() -> None:
    """A prompt of a million tokens has 64,000 keys."""
    trace, listener = RequestTrace(None, 16, SystemClock()), _Listener()
    trace._listeners.add(listener)
    prompt = (BlockKey(bytes(48)),) * (WAITING_BLOCKS_MAX // 4)
    for _ in range(10):
        trace._tell(_Seen(1.0, 5, 0, prompt))
    assert (len(listener.waiting), listener.missed) == (4, 6)
    listener.told()
    trace._tell(_Seen(1.0, 5, 0, prompt))
    assert (len(listener.waiting), listener.missed) == (4, 6)
    for _ in range(4):
        listener.told()
    trace._tell(_Seen(1.0, 5, 0, prompt * 9))  # longer than all that may wait: told alone
    trace._tell(_Seen(1.0, 5, 0, ()))
    assert (len(listener.waiting), listener.missed) == (1, 7)


@pytest.mark.parametrize("says", [b"", b"GET / HTTP/1.1", b"x" * 300_000])
def test_listeners_that_went_or_speak_leave_their_places(cache: kvtier.Cache, path: Path, says: bytes) -> None:
    """No request comes meanwhile: nothing is written to them."""
    assert eventually(path.exists)
    for _ in range(LISTENERS_MAX):
        with socket.socket(socket.AF_UNIX) as gone:
            gone.settimeout(0.2)
            gone.connect(str(path))
            with contextlib.suppress(OSError):
                gone.sendall(says)

    def heard() -> bool:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.settimeout(10)
            listening.connect(str(path))
            return listening.recv(1 << 12).startswith(b'{"kvtier_trace"')

    assert eventually(heard)


async def test_a_place_that_cannot_be_listened_at_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = Supervisor(SystemClock())
    RequestTrace(tmp_path / "no" / "such" / "folder", 16, SystemClock()).open(supervisor)
    assert await asyncio.to_thread(eventually, lambda: "trace.socket" in caplog.text)
    await supervisor.close(SystemClock().monotonic())
    assert not supervisor.restarts


def test_the_socket_goes_with_its_cache_but_not_that_of_a_later_one(path: Path) -> None:
    raw = {"tiers": {"g2": {"capacity": "1MiB"}}, "trace": {"socket": str(path)}}
    first = kvtier.open(Config.parse(raw), NS)
    assert eventually(path.exists)
    made = path.stat().st_ino
    with kvtier.open(Config.parse(raw), NS):
        assert eventually(lambda: path.exists() and path.stat().st_ino != made)
        first.close()
        assert path.exists()
    assert not path.exists()


@pytest.mark.parametrize("line", [b"", b"[]", b"[" * 9999, b'{"kvtier_trace": 2}', b"HTTP/1.1 400 Bad Request"])
def test_another_program_at_the_socket_is_named(line: bytes) -> None:
    with pytest.raises(FormatError, match="trace socket"):
        Recording(io.StringIO()).begin(line)


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\n"])
def test_a_socket_that_tells_nothing_costs_no_earlier_recording(path: Path, tmp_path: Path, says: bytes) -> None:
    """Nor is an empty file left, which the next try would not replace."""
    (tmp_path / "earlier.jsonl").write_text("earlier")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def answer() -> None:
            for _ in range(2):
                connection, _ = listening.accept()
                with connection:
                    connection.sendall(says)

        thread = threading.Thread(target=answer)
        thread.start()
        for name in ("earlier.jsonl", "new.jsonl"):
            with pytest.raises((SocketSilent, FormatError)):
                record(path, tmp_path / name, force=True)
        thread.join()
    assert (tmp_path / "earlier.jsonl").read_text() == "earlier" and not (tmp_path / "new.jsonl").exists()


@pytest.mark.parametrize(
    "line", [b"{}", b'{"at": 1, "input": 1, "output": 0, "missed": 0, "ids": "*"}', b'{"at": "x"}', b'{"at": 1e999}']
)
def test_a_line_that_cannot_be_read_is_named(line: bytes) -> None:
    with pytest.raises(FormatError):
        Recording(io.StringIO()).add(line)


@pytest.mark.parametrize(("after", "new"), [(0, 1), (-2, 1), (-1, -1), (-1, 10**12)])
def test_a_block_that_was_not_named_before_is_refused(after: int, new: int) -> None:
    with pytest.raises(ValueError, match="named so far"):
        RecordedChains().of(after, new)


def test_a_recording_with_a_wrong_line_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for line, says in [
        ('{"after": 7, "new": 1}', "t.jsonl:2: after 7"),
        ('{"after": 0.5}', "t.jsonl:2: after and new"),
    ]:
        path.write_text(f'{{"kvtier_trace": 1, "block_tokens": 16}}\n{line}\n')
        with pytest.raises(InvalidRequest, match=says):
            load_trace(path)
    path.write_text('{"kvtier_trace": 2, "block_tokens": 16}\n')
    with pytest.raises(InvalidRequest, match="version 1"):
        load_trace(path)


def test_commands_say_what_is_missing(tmp_path: Path, path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("tiers: {g2: {capacity: 1MiB}}\n")
    with pytest.raises(kvtier.ConfigError, match=r"trace\.socket is not set"):
        record(file, tmp_path / "out")
    file.write_text(f"trace: {{socket: {path}}}\n")
    with pytest.raises(kvtier.KVTierError, match="no cache listens there"):
        record(file, tmp_path / "out")
    assert not (tmp_path / "out").exists() and list(tmp_path.iterdir()) == [file]


def record_in(cache: kvtier.Cache, path: Path, out: Path, **named: Any) -> threading.Thread:
    """A thread that records until the cache is closed."""
    thread = threading.Thread(target=record, args=(path, out), kwargs=named)
    thread.start()
    assert eventually(lambda: bool(cache.trace._listeners))
    return thread


def test_a_recording_is_told_in_words_and_replaces_no_file(
    cache: kvtier.Cache, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("mine")
    with pytest.raises(InvalidRequest, match="--force"):
        record(path, out)
    assert out.read_text() == "mine"
    monkeypatch.setenv("COLUMNS", "300")
    thread = record_in(cache, path, out, force=True)
    ask(cache, list(range(64)))
    cache.submit(asyncio.sleep(0)).result(10)
    assert eventually(lambda: not any(listener.waiting for listener in cache.trace._listeners))
    cache.close()
    thread.join(30)
    told = capsys.readouterr()
    assert "Ctrl-C ends it" in told.err and "1 requests, 4 blocks in" in told.out and "are missing" not in told.out


def test_a_recording_ends_where_it_is_full(
    cache: kvtier.Cache, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Recording, "full", True)
    record(path, tmp_path / "out.jsonl", json=True)  # while the cache goes on
    assert json.loads(capsys.readouterr().out)["requests"] == 0


@pytest.mark.parametrize(
    ("sent", "error", "says"),
    [
        (b"", SocketSilent, "says nothing"),
        (b"x" * 4096, FormatError, "its line does not end"),
        (b'{"namespace": 7}\n', FormatError, "no trace socket of this release"),
        (b"[]\n", FormatError, "no trace socket of this release"),
    ],
)
def test_what_is_no_trace_socket_is_named(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes, error: type[Exception], says: str
) -> None:
    cli = importlib.import_module("kvtier.cli.trace_socket")
    monkeypatch.setattr(cli, "HEADER_BYTES_MAX", 1024)

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(sent)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        threading.Thread(target=answer, args=(listener,)).start()
        with pytest.raises(error, match=says):
            cli.told_namespace(path)
        if not sent:
            threading.Thread(target=answer, args=(listener,)).start()
            with pytest.raises(SocketSilent, match="says nothing"):
                record(path, tmp_path / "out.jsonl", json=True)


def test_a_silent_socket_is_given_up_at_its_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens, and never answers."""
    cli = importlib.import_module("kvtier.cli.trace_socket")
    monkeypatch.setattr(cli, "TELL_S", 0.01)
    monkeypatch.setattr(cli, "TICK_S", 0.005)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(SocketSilent, match="says nothing"):
            cli.told_namespace(path)


def test_conversions_say_what_is_wrong_and_what_was_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, out = tmp_path / "given.jsonl", tmp_path / "out.jsonl"
    given.write_text('{"timestamp": 0, "hash_ids": [1, 2], "input_length": 1024, "output_length": 1}\n' * 2)
    with pytest.raises(InvalidRequest, match="write kvtier or mooncake"):
        convert(given, out, to="other")
    with pytest.raises(InvalidRequest, match="--block-tokens"):
        convert(given, out, milliseconds=True)
    convert(given, out, json=True)
    assert json.loads(capsys.readouterr().out) == {
        "file": str(out), "format": "mooncake", "requests": 2, "blocks": 2, "block_tokens": 512,
    }  # fmt: skip
    with pytest.raises(InvalidRequest, match="--force"):
        convert(given, out)
