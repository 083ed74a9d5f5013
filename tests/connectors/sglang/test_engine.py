"""A real SGLang engine over kvtier, one process for all of it: tokens are those of the engine's own prefix cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.sglang.support.answers import alike
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(600)  # the first of them starts the engine

PROMPT_PAGES = 24


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tmp_path_factory.mktemp(name) for name in ("g3", "g4")}


@pytest.fixture(scope="module")
def engine(serve: Any, folders: dict[str, Path]) -> Any:
    return serve(
        {
            "g2": {"capacity": "16MiB"},
            "g3": {"path": str(folders["g3"]), "capacity": "256MiB"},
            "g4": {"url": f"file://{folders['g4']}/kv", "stride": 4},
        },
        deadlines={"get": "2s", "lookup": "1s"},
    )


@pytest.fixture(autouse=True)
def _whole(engine: Any) -> Iterator[None]:
    """After every scenario nothing is held (once the slowest reads are over), and every invariant stands."""
    yield
    engine.steer()
    engine.host.flush()
    assert eventually(lambda: not any(engine.order("check").values())), engine.order("check")


def test_tokens_after_a_flush_are_those_of_the_engines_own_hit(engine: Any, prompt: Any) -> None:
    (cold,) = engine.host.generate(prompt(1))
    (own,) = engine.host.generate(prompt(1))
    engine.host.flush()
    (restored,) = engine.host.generate(prompt(1))
    assert (cold["host"], own["host"]) == (0, 0)
    assert own["cached"] == restored["cached"] == restored["host"] == PROMPT_PAGES * 16
    assert (restored["tokens"], restored["logprobs"]) == (own["tokens"], own["logprobs"])
    assert alike(restored, cold), "a full prefill says the same"
    assert engine.order("witness") == {"same_blocks": PROMPT_PAGES, "other_blocks": 0}


def test_requests_at_once_over_a_shared_prefix(engine: Any, prompt: Any) -> None:
    prompts = [prompt(90, 208) + prompt(91 + i, 150 + i) for i in range(4)]
    computed = [engine.host.generate(tokens)[0] for tokens in prompts]
    engine.host.flush()
    engine.order("witness")
    restored = engine.host.generate(*prompts)
    assert all(alike(*pair) for pair in zip(restored, computed, strict=True))
    assert [answer["cached"] for answer in restored] == [(len(tokens) - 1) // 16 * 16 for tokens in prompts]
    seen = engine.order("witness")
    assert seen["other_blocks"] == 0 < seen["same_blocks"]


def test_damaged_bytes_would_show(engine: Any, prompt: Any) -> None:
    (own,) = engine.host.generate(prompt(2))
    engine.host.flush()
    engine.steer(scramble=True)
    (damaged,) = engine.host.generate(prompt(2))
    engine.steer()
    assert damaged["host"] == PROMPT_PAGES * 16
    assert damaged["tokens"] != own["tokens"] and not alike(damaged, own)
    assert engine.order("witness") == {"same_blocks": 0, "other_blocks": PROMPT_PAGES}


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


@pytest.mark.parametrize(("ceiling", "left", "below"), [("g2", ["g2"], "g3"), ("g3", ["g2", "g3"], "g4")])
def test_a_ceiling_keeps_blocks_above_it(engine: Any, prompt: Any, ceiling: str, left: list[str], below: str) -> None:
    seed, before = {"g2": 13, "g3": 14}[ceiling], engine.metric("kvtier_tier_stored_blocks_total", tier=below)
    engine.host.generate(prompt(seed), kvtier={"ceiling": ceiling})
    engine.push_down(*left)
    (again,) = engine.host.generate(prompt(seed), kvtier={"store": False})
    assert again["cached"] == 0
    assert engine.metric("kvtier_tier_stored_blocks_total", tier=below) == before


def test_answers_say_what_became_of_their_requests(engine: Any, prompt: Any) -> None:
    (first,) = engine.host.generate(prompt(15), rid=["first"], new=32, kvtier={"pin": {"name": "p", "ttl": "1h"}})
    ((reported,),) = [[entry for entry in first["answer"] if entry is not None]]
    assert (reported["tokens_read"], reported["pin"]["name"]) == ({}, "p")
    assert reported["pin"].get("until", 0) > time.time()
    engine.host.flush()
    (same,) = engine.host.generate(prompt(15), kvtier={"compared_with": "first"})
    assert same["answer"] == [{"tokens_read": {"g2": PROMPT_PAGES * 16}, "same_tokens": PROMPT_PAGES * 16}]
    (half,) = engine.host.generate(prompt(15)[:200] + prompt(16, 197), kvtier={"compared_with": "first"})
    assert half["answer"] == [{"tokens_read": {}, "same_tokens": 192}]
    (other,) = engine.host.generate(prompt(15), cache_salt="else", kvtier={"compared_with": "first"})
    assert other["answer"] == [{"tokens_read": {}, "same_tokens": None}]


@pytest.mark.parametrize("tier", ["g3", "g4"])
def test_what_left_host_ram_comes_back_from_below(engine: Any, prompt: Any, tier: str) -> None:
    seed = {"g3": 20, "g4": 21}[tier]
    engine.host.generate(prompt(seed))
    (own,) = engine.host.generate(prompt(seed))
    engine.push_down("g2", *(["g3"] if tier == "g4" else []))
    before = engine.read(tier)
    (restored,) = engine.host.generate(prompt(seed))
    assert restored["host"] == PROMPT_PAGES * 16
    assert (restored["tokens"], restored["logprobs"]) == (own["tokens"], own["logprobs"])
    assert restored["answer"] == [{"tokens_read": {tier: PROMPT_PAGES * 16}}]
    assert engine.read(tier) - before == PROMPT_PAGES * 16


@pytest.mark.parametrize("kind", ["error", "slow", "drop"])
@pytest.mark.parametrize("tier", ["g3", "g4"])
def test_a_sick_tier_is_a_miss(engine: Any, prompt: Any, tier: str, kind: str) -> None:
    seed = 30 + 10 * int(tier[1]) + len(kind)
    engine.host.generate(prompt(seed))
    (own,) = engine.host.generate(prompt(seed))
    engine.push_down("g2", *(["g3"] if tier == "g4" else []))
    engine.steer(faults={tier: [["read", kind, 1.0, None, 8.0]]})
    (computed,) = engine.host.generate(prompt(seed))
    assert computed["host"] == 0
    assert computed["tokens"] == own["tokens"]
    assert computed["seconds"] < 7.5, "a request waits until deadlines.get and no longer"


@pytest.mark.parametrize("tier", ["g3", "g4"])
def test_flipped_bits_are_never_served(
    engine: Any, prompt: Any, folders: dict[str, Path], damage: Any, tier: str
) -> None:
    seed = {"g3": 60, "g4": 61}[tier]
    engine.host.generate(prompt(seed))
    (own,) = engine.host.generate(prompt(seed))
    engine.push_down("g2", *(["g3"] if tier == "g4" else []))
    assert damage(folders[tier])
    (computed,) = engine.host.generate(prompt(seed))
    assert computed["host"] == 0
    assert computed["tokens"] == own["tokens"]
    assert engine.metric("kvtier_tier_miss_blocks_total", tier=tier, reason="corrupt") > 0


def test_a_prompt_that_another_request_computes_meanwhile_is_not_waited_for(engine: Any, prompt: Any) -> None:
    """The first of two gives up on a slow disk and computes; the second, which came later, finds it on the device."""
    engine.host.generate(prompt(71))
    (own,) = engine.host.generate(prompt(71))
    engine.push_down("g2")
    engine.steer(faults={"g3": [["read", "slow", 1.0, None, 8.0]]})
    first, second = engine.host.ask(do="staggered", prompts=[prompt(71)] * 2, apart=0.5)
    assert first["tokens"] == second["tokens"] == own["tokens"]
    assert (first["cached"], second["cached"], second["host"]) == (0, PROMPT_PAGES * 16, 0)
    assert second["seconds"] < 7.5


def test_an_aborted_request_waits_no_more(engine: Any, prompt: Any) -> None:
    engine.host.generate(prompt(70))
    (own,) = engine.host.generate(prompt(70))
    engine.push_down("g2")
    engine.steer(faults={"g3": [["read", "slow", 1.0, None, 1.0]]})
    assert engine.host.ask(do="abort", prompts=[prompt(70)], after=0.3) in ("abort", "CancelledError")
    engine.steer()
    (restored,) = engine.host.generate(prompt(70))
    assert restored["host"] == PROMPT_PAGES * 16
    assert restored["tokens"] == own["tokens"]


def test_a_load_that_fails_ends_its_request_and_poisons_nothing(engine: Any, prompt: Any) -> None:
    engine.host.generate(prompt(75))
    (own,) = engine.host.generate(prompt(75))
    engine.host.flush()
    engine.steer(lose=True)
    answer = engine.host.ask(do="generate", prompts=[prompt(75)])
    assert "error" in answer, answer
    engine.steer()
    (restored,) = engine.host.generate(prompt(75))
    assert restored["host"] == PROMPT_PAGES * 16
    assert restored["tokens"] == own["tokens"]


def test_tokens_read_are_reported_by_tier(engine: Any, prompt: Any) -> None:
    before = engine.metric("kvtier_tokens_read_total", tier="g2")
    engine.host.generate(prompt(78))
    engine.host.flush()
    engine.host.generate(prompt(78))
    assert engine.metric("kvtier_tokens_read_total", tier="g2") - before == PROMPT_PAGES * 16
    assert engine.metric("kvtier_events_total", event="blocks_stored") > PROMPT_PAGES


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
        pytest.fail("no hit with new weights; the engine said:\n" + engine.host.last_words())


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
