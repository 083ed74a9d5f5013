"""A real SGLang engine over kvtier, one process for all of it: tokens are those of the engine's own prefix cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PROMPT_PAGES = 24


@pytest.fixture(scope="module")
def engine(serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield serve({"g2": {"capacity": "16MiB"}, "g3": {"path": str(tmp_path_factory.mktemp("g3")), "capacity": "256MiB"}})


def stored_by(engine: Any, blocks: float, tier: str = "g3") -> None:
    """Wait until the write-behind has brought so many blocks to a tier."""
    for _ in range(200):
        if engine.metric("kvtier_tier_stored_blocks_total", tier=tier, outcome="stored") >= blocks:
            return
        time.sleep(0.1)
    pytest.fail(f"{tier} did not get {blocks} blocks")


def test_tokens_after_a_flush_are_those_of_the_engines_own_hit(engine: Any, prompt: Any) -> None:
    (cold,) = engine.host.generate(prompt(1))
    (own,) = engine.host.generate(prompt(1))
    engine.host.flush()
    (restored,) = engine.host.generate(prompt(1))
    assert (cold["host"], own["host"]) == (0, 0)
    assert own["cached"] == restored["cached"] == restored["host"] == PROMPT_PAGES * 16
    assert restored["tokens"] == own["tokens"]


def test_damaged_bytes_would_show(engine: Any, prompt: Any) -> None:
    (own,) = engine.host.generate(prompt(2))
    engine.host.flush()
    engine.steer(scramble=True)
    (damaged,) = engine.host.generate(prompt(2))
    engine.steer()
    assert damaged["host"] == PROMPT_PAGES * 16
    assert damaged["tokens"] != own["tokens"]


def test_restored_pages_are_not_stored_again(engine: Any, prompt: Any) -> None:
    engine.host.generate(prompt(3))
    engine.host.flush()
    before = engine.metric("kvtier_accepted_blocks_total")
    (restored,) = engine.host.generate(prompt(3))
    assert restored["host"] == PROMPT_PAGES * 16
    assert engine.metric("kvtier_accepted_blocks_total") == before


def test_a_longer_prompt_continues_a_stored_one(engine: Any, prompt: Any) -> None:
    longer = prompt(4) + prompt(5, 200)
    (own,) = engine.host.generate(longer)
    engine.host.flush()
    engine.host.generate(prompt(4))  # its pages are on the device again: the rest continues from there
    (restored,) = engine.host.generate(longer)
    assert restored["cached"] == (len(longer) - 1) // 16 * 16
    assert 0 < restored["host"] < restored["cached"]
    assert restored["tokens"] == own["tokens"]


def test_a_refused_load_is_recomputed(engine: Any, prompt: Any) -> None:
    (own,) = engine.host.generate(prompt(6))
    engine.host.flush()
    engine.steer(refuse=True)
    (computed,) = engine.host.generate(prompt(6))
    engine.steer()
    assert computed["host"] == 0
    assert computed["tokens"] == own["tokens"]


@pytest.mark.parametrize("name", ["cache_salt", "extra_key"])
def test_salts_never_share(engine: Any, prompt: Any, name: str) -> None:
    seed = {"cache_salt": 7, "extra_key": 8}[name]
    engine.host.generate(prompt(seed), **{name: "alice"})
    engine.host.flush()
    (stranger,) = engine.host.generate(prompt(seed), **{name: "bob"})
    (nobody,) = engine.host.generate(prompt(seed))
    (friend,) = engine.host.generate(prompt(seed), **{name: "alice"})
    assert (stranger["cached"], nobody["cached"]) == (0, 0)
    assert friend["host"] == PROMPT_PAGES * 16, friend


@pytest.mark.parametrize("length", [5, 16, 17, 32, 33])
def test_short_prompts_and_whole_pages(engine: Any, prompt: Any, length: int) -> None:
    (own,) = engine.host.generate(prompt(100 + length, length))
    engine.host.flush()
    (restored,) = engine.host.generate(prompt(100 + length, length))
    assert restored["host"] == (length - 1) // 16 * 16
    assert restored["tokens"] == own["tokens"]


def test_requests_say_what_may_be_kept(engine: Any, prompt: Any) -> None:
    for seed, asked in ((10, {"store": False}), (11, {"retention": "no such class"})):
        engine.host.generate(prompt(seed), kvtier=asked)
        engine.host.flush()
        (again,) = engine.host.generate(prompt(seed))
        assert again["cached"] == 0, asked
    engine.host.generate(prompt(12), kvtier={"retention": "5m"})
    engine.host.flush()
    (unread,) = engine.host.generate(prompt(12), kvtier={"load": False})
    assert unread["cached"] == 0
    engine.host.flush()
    (again,) = engine.host.generate(prompt(12))
    assert again["host"] == PROMPT_PAGES * 16


def test_what_left_host_ram_comes_back_from_the_disk(engine: Any, prompt: Any) -> None:
    (own,) = engine.host.generate(prompt(20))
    for seed in range(21, 40):  # more than G2 holds
        engine.host.generate(prompt(seed, 800), new=1)
        engine.host.flush()
    (restored,) = engine.host.generate(prompt(20))
    assert engine.metric("kvtier_tier_loaded_blocks_total", tier="g3") >= PROMPT_PAGES
    assert restored["host"] == PROMPT_PAGES * 16
    assert restored["tokens"] == own["tokens"]


def test_a_sick_disk_is_a_miss(engine: Any, prompt: Any) -> None:
    (own,) = engine.host.generate(prompt(50))
    for seed in range(51, 70):
        engine.host.generate(prompt(seed, 800), new=1)
        engine.host.flush()
    engine.steer(faults={"g3": [["read", "error"], ["lookup", "error"]]})
    (computed,) = engine.host.generate(prompt(50))
    engine.steer()
    assert computed["host"] == 0
    assert computed["tokens"] == own["tokens"]


def test_new_weights_never_meet_old_blocks(engine: Any, prompt: Any, model: Path, other_model: Path) -> None:
    (old,) = engine.host.generate(prompt(80))
    assert engine.host.ask(do="update", path=str(other_model))[0]
    (new,) = engine.host.generate(prompt(80))
    engine.host.flush()
    (again,) = engine.host.generate(prompt(80))  # finds what was computed since, or nothing
    assert new["cached"] == 0
    assert new["tokens"] == again["tokens"] != old["tokens"]
    assert engine.host.ask(do="update", path=str(model))[0]
    (back,) = engine.host.generate(prompt(80))
    assert back["cached"] == 0
    assert back["tokens"] == old["tokens"]
    recovered = _until(lambda: _hit_after_flush(engine, prompt(81)))
    if not recovered:
        pytest.fail("no hit with new weights; the engine said:\n" + "".join(engine.host.log[-60:]))


def _hit_after_flush(engine: Any, tokens: list[int]) -> int:
    engine.host.generate(tokens)
    engine.host.flush()
    return int(engine.host.generate(tokens)[0]["host"])


def _until(poll: Callable[[], int]) -> int:
    """The first non-zero answer; 0 if there is none (the cache reopens off the engine's thread)."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if answer := poll():
            return answer
        time.sleep(0.5)
    return 0
