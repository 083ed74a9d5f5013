"""`kvtier explain --engine`: a running cache is asked about its latest requests, over its trace socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvtier
from kvtier.cli.ask import ask
from kvtier.cli.prompt_break import BUILTIN
from kvtier.cli.trace_socket import SocketSilent
from kvtier.errors import FormatError, InvalidRequest
from kvtier.identity.keys import make_keys, scope_of
from kvtier.journal.answers import Answers
from kvtier.journal.journal import Journal
from kvtier.journal.served import ServedRequest
from kvtier.request_trace import LISTENERS_MAX
from kvtier.testing import payloads_of
from tests.support.trace_socket import listening_cache
from tests.support.waiting import eventually

RANDOM = random.Random(11)
SYSTEM = [RANDOM.randrange(50_000) for _ in range(400)]
HISTORY = [RANDOM.randrange(50_000) for _ in range(1200)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.sock"


@pytest.fixture
def cache(path: Path) -> Iterator[kvtier.Cache]:
    with listening_cache(path) as cache:
        yield cache


def served(cache: kvtier.Cache, name: str, tokens: Sequence[int], salt: str | None = None, **facts: Any) -> None:
    """As an engine's connector tells of a request."""
    keys = cache.chain_hashes(tokens, salt)
    seen = ServedRequest(name, scope_of(salt), facts.pop("at_s", 1e6), len(tokens), **facts)
    count = len(cache.journal.latest())
    cache.journal.record(seen, keys, list(tokens))  # type: ignore[arg-type]
    assert eventually(lambda: len(cache.journal.latest()) == count + 1)


def dated(number: int) -> list[int]:
    return [*SYSTEM[:100], 60_000 + number, *SYSTEM[100:], *HISTORY]


def test_a_request_is_set_beside_the_one_that_it_is_like(cache: kvtier.Cache, path: Path, run: Any) -> None:
    cache.computed(1600, 1.0)
    served(cache, "first", dated(1))
    served(cache, "other", HISTORY[::-1])
    served(cache, "second", dated(2), at_s=1e6 + 400, given={"g2": 96}, why="absent",
           placed_s=0.25, waited_s=0.125, first_s=2.5, output_tokens=7)  # fmt: skip
    found = run("explain", "--engine", path, "second", "--json").json()
    assert found["earlier"]["name"] == "first" and found["request"]["given"] == {"g2": 96}
    assert (found["same_tokens"], found["cause"], found["parted_tokens"], found["gone_tokens"]) == (
        100,
        "value",
        1488,
        0,
    )
    assert found["lost_seconds"] == pytest.approx(1488 / 1600, abs=0.001) and found["pause_s"] == 400.0
    assert BUILTIN[found["kept_by"]].ttl >= 400
    text = run("explain", "--engine", path, "second").out
    for part in (
        "1,601 tokens, 96 from g2, 1,505 computed (absent)",
        "first token after 2.500 s",
        "agree for 100 tokens",
        "Likely cause: value; a few tokens change",
        "about 1,488 tokens that both have",
        "0.93 s of prefill",
    ):
        assert part in text
    named = run("explain", "--engine", path, "other", "second", "--json").json()
    assert named["earlier"]["name"] == "other" and named["same_tokens"] == 0 and named["cause"] == "changed"
    alone = run("explain", "--engine", path, "first")
    assert alone.status == 0 and "None of the latest 3 requests has a prompt like it" in alone.out


def test_the_engine_s_yaml_names_its_socket(cache: kvtier.Cache, path: Path, tmp_path: Path, run: Any) -> None:
    served(cache, "cmpl-7-0", SYSTEM)
    (tmp_path / "kv.yaml").write_text(f"tiers: {{g2: {{capacity: 1MiB}}}}\ntrace: {{socket: {path}}}\n")
    assert run("explain", "--engine", tmp_path / "kv.yaml", "cmpl-7", "--json").json()["request"]["name"] == "cmpl-7-0"


def test_long_ids_are_found_and_ids_that_no_request_has_are_refused(cache: kvtier.Cache, path: Path, run: Any) -> None:
    """A client may choose its request's id; of the longest 256 characters are remembered."""
    name = "trace-" + "0123456789" * 40
    served(cache, f"{name}-0", SYSTEM)
    for wanted in (f"{name}-0", name):
        found = run("explain", "--engine", path, wanted, "--json")
        assert found.status == 0 and name.startswith(found.json()["request"]["name"])
    failed = run("explain", "--engine", path, name * 20)
    assert failed.status == 2 and "a question has at most 4096 bytes" in failed.err
    for odd in ("a\ud800b", "\x1b[31m", "‮evil"):
        failed = run("explain", "--engine", path, odd)
        assert failed.status == 2 and "is not among the latest" in failed.err
        assert not set("\x1b‮\ud800") & set(failed.err)


def test_a_get_of_a_program_is_explained_by_its_names(cache: kvtier.Cache, path: Path, run: Any) -> None:
    """No tokens are known."""
    keys = cache.chain_hashes(range(160))
    with cache.get(keys, request_id="a"):
        pass
    cache.put(keys, payloads_of(keys, 4096))
    with cache.get(keys[:5], start=2, request_id="b") as hit:
        assert len(hit) == 3
    assert eventually(lambda: len(cache.journal.latest()) == 2)
    found = run("explain", "--engine", path, "b", "--json").json()
    assert found["earlier"]["name"] == "a" and found["cause"] == "none" and found["same_tokens"] == 80
    assert found["request"]["given"] == {"g1": 32, "g2": 48} and found["gone_tokens"] == 0


def test_the_dearest_breaks(cache: kvtier.Cache, path: Path, run: Any) -> None:
    assert "None of them" in run("explain", "--engine", path, "--top").out
    for number in range(4):
        served(cache, f"r{number}", dated(number), why="absent", given={"g2": 96} if number else {})
    found = run("explain", "--engine", path, "--top", "--json").json()
    (row,) = found["breaks"]
    assert (row["cause"], row["requests"], row["lost_tokens"], row["lost_seconds"]) == ("value", 3, 3 * 1488, None)
    (heat,) = ask(path, {"ask": "latest"})["prefixes"]
    assert heat["given"] == {"g2": 288} and heat["requests"] == 4 and heat["shared_tokens"] == 96
    text = run("explain", "--engine", path, "--top").out
    assert row["prefix"] in text and "4,464" in text and "put them behind what stays" in text


class Letters:
    """A tokenizer: letters by their numbers."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def test_with_the_tokenizer_at_hand_the_text_is_shown(
    cache: kvtier.Cache, path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, day in enumerate(("2026-11-22", "2026-11-23")):
        text = f"You are an assistant of the company. Today is {day}. " + "Be kind and answer briefly, please. " * 20
        served(cache, f"r{number}", [*map(ord, text)])
    plain = run("explain", "--engine", path, "r1")
    assert "value" in plain.out and "2026" not in plain.out
    monkeypatch.setattr("kvtier.cli.explain._tokenizer_of", lambda folder: Letters())
    shown = run("explain", "--engine", path, "r1", "--tokenizer", "any")
    assert "Likely cause: timestamp" in shown.out and "2026-11-22" in shown.out and "2026-11-23" in shown.out
    found = run("explain", "--engine", path, "r1", "--tokenizer", "any", "--json").json()
    assert "excerpt" not in found and found["cause"] == "timestamp" and len(found["texts"]["later"]) <= 100


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["{path}"], "needs the id of a request, or --top"),
        (["{path}", "a", "--top"], "needs the id of a request, or --top"),
        (["{path}", "a", "--pause", "5m"], "--pause and --prefill-rate are for files"),
        (["{path}", "nobody"], "'nobody' is not among the latest 0 requests"),
    ],
)
def test_mistakes_are_named(cache: kvtier.Cache, path: Path, run: Any, words: list[str], part: str) -> None:
    ran = run("explain", "--engine", *(word.format(path=path) for word in words))
    assert ran.status == 2 and part in ran.err
    assert run("explain", "one.txt").status == 2


@pytest.mark.parametrize(
    "line",
    [
        b"[1]",
        b"{",
        b'{"ask": "everything"}',
        b'{"ask": "request"}',
        b'{"ask": "request", "name": 7}',
        b"[" * 4000,
        b"\xff\xfe",
        b'{"ask": "request", "name": "a", "earlier": "a"}',
    ],
)
def test_odd_questions_are_refused(line: bytes) -> None:
    answer = Answers(Journal(16), time.time, lambda: None).to(line)
    assert set(answer) == {"kvtier_answer", "refused"} and json.dumps(answer)


def test_listeners_leave_a_place_for_questions_and_a_question_is_no_listener(cache: kvtier.Cache, path: Path) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(LISTENERS_MAX):
            listening = held.enter_context(socket.socket(socket.AF_UNIX))
            listening.connect(str(path))
        assert eventually(lambda: len(cache.trace._listeners) == LISTENERS_MAX)
        for _ in range(3):
            assert ask(path, {"ask": "latest"})["requests"] == 0
        assert len(cache.trace._listeners) == LISTENERS_MAX
    assert eventually(lambda: not cache.trace._listeners)


def test_a_question_that_does_not_end_is_given_up(cache: kvtier.Cache, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(10)
        asking.connect(str(path))
        with contextlib.suppress(OSError):
            asking.sendall(b"x" * 100_000 + b"\n")
        with contextlib.suppress(OSError):
            while asking.recv(1 << 12):
                pass
    assert eventually(lambda: not cache.trace._listeners) and ask(path, {"ask": "latest"})


def endless(**changed: Any) -> bytes:
    """An answer with a number that has no end."""
    request = {"name": "r", "why": "", "given": {}, "ago_s": 1.0, "input_tokens": 1, "computed_tokens": 1, **changed}
    return json.dumps({"kvtier_answer": 1, "request": request, "earlier": None, "requests": 1}).encode() + b"\n"


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b'{"kvtier_answer": 1}\n', FormatError),
        (b'{"kvtier_answer": 2}\n', FormatError),
        (b'{"kvtier_answer": 1, "request": 7, "earlier": null}\n', FormatError),
        (b'{"kvtier_answer": ' + b"[" * 9999 + b"\n", FormatError),
        (endless(given={"g2": float("inf")}), FormatError),
        (endless(ago_s=float("inf")), FormatError),
        (b'{"kvtier_answer": 1, "refused": "no \\u001b[31m"}\n', InvalidRequest),
        (b'{"kvtier_trace": 1}\n', SocketSilent),
        (b"", SocketSilent),
    ],
)
def test_another_program_at_the_socket_is_named(path: Path, said: bytes, error: type[Exception]) -> None:
    from kvtier.cli.explain import explain

    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()

    def answer() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(1 << 12)
            connection.sendall(said)

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(error) as wrong:
        explain("r", engine=path)
    assert "\x1b" not in str(wrong.value)
    thread.join(10)
    server.close()


async def test_what_an_answer_says_holds_no_salt_key_or_token() -> None:
    """But for the excerpt, which who asks must ask for."""
    journal, salt = Journal(16), "tenant-canary-55"
    journal.open()
    scope = scope_of(salt)
    for name, first in (("a", 1), ("b", 2)):
        tokens = [0x5EC2E700 + first, *range(0x5EC2E7, 0x5EC2E7 + 300)]
        keys = make_keys(scope, [bytes([first, number]) * 16 for number in range(18)])
        journal.record(ServedRequest(name, scope, 1.0, len(tokens), given={"g2": 16}, placed_s=1.0), keys, tokens)
    await asyncio.sleep(0)
    told = Answers(journal, time.time, lambda: 0.5)
    lines = [b'{"ask": "latest"}', b'{"ask": "breaks"}', b'{"ask": "request", "name": "b"}']
    said = "".join(json.dumps(told.to(line)) for line in lines)
    assert '"cause": "value"' in said and '"parted_tokens": 288' in said
    for secret in (salt, scope.hex(), scope.hex()[:12], str(0x5EC2E7), str(0x5EC2E702), (bytes([2, 3]) * 4).hex()):
        assert secret not in said
    shown = told.to(b'{"ask": "request", "name": "b", "excerpt": true}')["excerpt"]
    assert shown["later"][0] == 0x5EC2E702 and len(shown["later"]) <= 512
