"""The connector in a real vLLM engine: the same tokens out, whatever happens to the cache.

One engine with scheduler and worker in its process serves all scenarios here and in test_engine_copies, so that they
can look inside; test_engine_restart ends it.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.connectors.vllm.support.prompts import BLOCK, IDLE, keeps_accounts, prompt, tokens

pytestmark = pytest.mark.timeout(600)


def test_blocks_come_back_from_host_memory_after_a_prefix_reset(engine: Any) -> None:
    prompts = [prompt(1, 500), prompt(1, 500)[:300] + prompt(2, 150)]
    cold = [engine.generate(prompts=[p])[0] for p in prompts]
    own = [engine.generate(prompts=[p])[0] for p in prompts]
    assert own[0]["read"] == {} and own[0]["cached"] == 480, "the engine's own prefix cache answers first"
    assert engine.reset()
    warm = [engine.generate(prompts=[p])[0] for p in prompts]
    assert tokens(warm) == tokens(own) == tokens(cold)
    assert [out["read"] for out in warm] == [{"g2": 480}, {"g2": 160}]
    assert engine.check() == IDLE


def test_wrong_bytes_would_be_noticed(engine: Any) -> None:
    """The control of every other test here: zeros instead of KV change the tokens."""
    right = engine.generate(prompts=[prompt(3)])
    assert engine.reset()
    engine.break_loads(how="zeros")
    wrong = engine.generate(prompts=[prompt(3)])
    engine.mend()
    assert wrong[0]["read"] == {"g2": 288} and tokens(wrong) != tokens(right)
    assert engine.reset()
    assert tokens(engine.generate(prompts=[prompt(3)])) == tokens(right)


def test_blocks_come_back_from_disk(engine: Any) -> None:
    cold = engine.generate(prompts=[prompt(4)])
    assert engine.flush()["pending"] == 0
    assert engine.reset()
    reported = engine.sources()
    engine.generate(prompts=[prompt(4)])
    assert engine.evict(tier="g2") > 0
    assert engine.reset()
    warm = engine.generate(prompts=[prompt(4)])
    assert tokens(warm) == tokens(cold) and warm[0]["read"] == {"g3": 288}
    reported = {name: count - reported.get(name, 0) for name, count in engine.sources().items()}
    if keeps_accounts():
        assert reported["vllm:kvtier_tokens_read:g2"] == reported["vllm:kvtier_tokens_read:g3"] == 288
        assert reported["host"] == reported["disk"] == 288, "and so it is in vLLM's own account"
    assert engine.check() == IDLE


def test_a_block_that_changed_on_disk_is_computed_and_stored_again(engine: Any, config: dict[str, Any]) -> None:
    cold = engine.generate(prompts=[prompt(4)])
    for outcome in ({}, {"g3": 288}):
        assert engine.flush()["pending"] == 0
        if not outcome:
            assert engine.corrupt(folder=config["tiers"]["g3"]["path"]) > 0
        assert engine.evict(tier="g2") > 0
        assert engine.reset()
        warm = engine.generate(prompts=[prompt(4)])
        assert tokens(warm) == tokens(cold) and warm[0]["read"] == outcome
    assert engine.stats()["requests"]["misses"]["corrupt"] > 0
    assert engine.check() == IDLE


def test_prompts_of_many_lengths_share_and_never_load_their_last_token(engine: Any) -> None:
    whole = prompt(5, 4 * BLOCK + 1)
    lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 1]
    cold = [engine.generate(prompts=[whole[:n]], settle=False)[0] for n in lengths]
    engine.settle()
    for length, out in zip(lengths, cold, strict=True):
        assert engine.reset()
        warm = engine.generate(prompts=[whole[:length]])[0]
        assert warm["tokens"] == out["tokens"]
        assert sum(warm["read"].values()) == (length - 1) // BLOCK * BLOCK


def fields_of_events() -> set[str]:
    """Older releases say less."""
    from vllm.distributed.kv_events import BlockStored

    return set(BlockStored.__struct_fields__)


def test_routers_hear_where_blocks_lie(engine: Any) -> None:
    asked = prompt(50, 200)
    engine.heard()
    engine.generate(prompts=[asked])
    assert engine.flush()["pending"] == 0
    engine.generate(prompts=[[5]])  # events leave with a step
    heard = [event for event in engine.heard() if event["medium"] in ("CPU", "STORAGE")]
    local = "LOCAL" if "locality" in fields_of_events() else None
    assert {event["ownership"] for event in heard} == {None}
    for medium in ("CPU", "STORAGE"):
        stored = [event for event in heard if event["kind"] == "BlockStored" and event["medium"] == medium]
        mine = {event["hashes"][0]: event for event in stored if event["tokens"] and event["locality"] == local}
        heads = [event for event in mine.values() if event["tokens"] == asked[:BLOCK]]
        assert len(heads) == 1 and heads[0]["parent"] == ""
        chained, found = heads[0], list(heads[0]["tokens"])
        while follower := next((e for e in mine.values() if e["parent"] == chained["hashes"][0]), None):
            chained, found = follower, found + follower["tokens"]
        assert found[: 6 * BLOCK] == asked[: 6 * BLOCK], "each block names the one before it"
    gone = engine.evict(tier="g2")
    engine.generate(prompts=[[5]])
    removed = [event for event in engine.heard() if event["kind"] == "BlockRemoved" and event["medium"] == "CPU"]
    assert sum(len(event["hashes"]) for event in removed) == gone > 0


def test_decoded_blocks_are_kept_too(engine: Any) -> None:
    first = engine.generate(prompts=[prompt(6, 60)], tokens=70)[0]
    assert engine.reset()
    longer = prompt(6, 60) + first["tokens"]
    warm = engine.generate(prompts=[longer + [5] * 8])[0]
    assert warm["read"] == {"g2": 128}, "130 tokens have KV: all of the 60 + 70 but the last"
    assert engine.reset()
    plain = engine.generate(prompts=[longer + [5] * 8], control={"load": False})[0]
    assert plain["tokens"] == warm["tokens"] and plain["read"] == {} and plain["cached"] == 0
    engine.limit(decode=False)
    engine.generate(prompts=[prompt(160, 60)], tokens=70)
    engine.limit(decode=True)
    assert engine.resident(prompt=[*prompt(160, 60), *[5] * 8])[0] == 1, "`decode_blocks: false`: the prompt's only"
    assert engine.check()["dirty"] == 0


def test_concurrent_requests_over_a_shared_prefix(engine: Any) -> None:
    prompts = [prompt(7, 200) + prompt(20 + i, 90) for i in range(6)]
    alone = [engine.generate(prompts=[p])[0] for p in prompts]
    assert engine.reset()
    together = engine.generate(prompts=prompts)
    assert tokens(together) == tokens(alone)
    assert all(out["cached"] >= 192 for out in together)
    assert engine.check() == IDLE


def test_promotion_is_asked_for_once_and_ends_with_its_request(engine: Any) -> None:
    engine.generate(prompts=[prompt(64)])
    engine.flush()
    engine.evict(tier="g2")
    assert engine.reset()
    engine.sicken(tier="g3", how="hang")
    engine.record_calls()
    engine.add(name="waits", prompt=prompt(64))
    engine.steps(count=5)
    assert engine.prefetch_of(name="waits") == "runs"
    engine.abort(name="waits")
    engine.steps(count=1)
    assert engine.prefetch_of(name="waits") == "cancelled"
    assert [name for name, _ in engine.calls()].count("promote") == 1
    engine.sicken(tier="g3", how="")
    engine.settle()


def test_a_hanging_disk_costs_a_request_no_more_than_the_deadline(engine: Any) -> None:
    right = engine.generate(prompts=[prompt(65)])
    engine.flush()
    engine.evict(tier="g2")
    assert engine.reset()
    engine.sicken(tier="g3", how="hang")
    engine.limit(lookup_deadline_s=0.2)
    late = engine.counters().get("lookups_late", 0)
    out = engine.timed(prompts=[prompt(65)], tokens=24)
    engine.limit(lookup_deadline_s=30.0)
    engine.sicken(tier="g3", how="")
    assert out["tokens"] == tokens(right) and out["seconds"] < 15
    assert engine.counters()["lookups_late"] == late + 1
    engine.sleep(seconds=0.2)
    engine.settle()


def test_what_would_arrive_later_than_prefill_takes_is_computed(engine: Any) -> None:
    right = engine.generate(prompts=[prompt(66, 500)])[0]
    engine.flush()
    engine.limit(weighs_loads=True)
    engine.generate(prompts=[prompt(67, 500)])
    cost = engine.prefill_cost()
    assert cost is not None and 1e-5 < cost < 10
    for load_s, read in ((100 * cost, {}), (cost / 100, {"g3": 480})):
        engine.evict(tier="g2")
        assert engine.reset()
        engine.pretend(tier="g3", seconds_per_block=load_s)
        again = engine.generate(prompts=[prompt(66, 500)])[0]
        assert again["tokens"] == right["tokens"] and again["read"] == read
    assert engine.stats()["requests"]["misses"]["slower"] == 15
    engine.limit(weighs_loads=False)
    engine.pretend(tier="g3", seconds_per_block=None)


def test_salts_share_nothing(engine: Any) -> None:
    mine = engine.generate(prompts=[prompt(14)], salt="a")[0]
    assert engine.reset()
    theirs = engine.generate(prompts=[prompt(14)], salt="b")[0]
    nobodys = engine.generate(prompts=[prompt(14)])[0]
    assert theirs["read"] == nobodys["read"] == {}
    assert engine.reset()
    again = engine.generate(prompts=[prompt(14)], salt="a")[0]
    assert again["read"] == {"g2": 288} and again["tokens"] == mine["tokens"] == theirs["tokens"]


def test_a_request_says_what_is_kept(engine: Any) -> None:
    engine.generate(prompts=[prompt(15)], control={"store": False})
    assert engine.resident(prompt=prompt(15)) == [0, 0]
    engine.generate(prompts=[prompt(16)], control={"ceiling": "g2"})
    assert engine.flush()["pending"] == 0
    engine.evict(tier="g2")
    assert engine.resident(prompt=prompt(16)) == [0, 0]
    engine.generate(prompts=[prompt(17)], control={"retention": "for ever"})
    assert engine.resident(prompt=prompt(17)) == [0, 0], "what cannot be understood is not kept"


def test_a_request_says_by_token_range_what_is_kept(engine: Any) -> None:
    """Blocks 0 … 2 may go to disk, those behind them stay in host memory."""
    engine.generate(prompts=[prompt(70)], control={"ranges": [[0, 96, "24h"], [96, 4096, "in_memory"]]})
    engine.flush()
    assert engine.evict(tier="g2") > 0
    assert engine.reset()
    warm = engine.generate(prompts=[prompt(70)], control={"ranges": [[0, 96, "24h"], [96, 4096, "in_memory"]]})
    assert warm[0]["read"] == {"g3": 96}
    assert engine.resident(prompt=prompt(70)) == [0, 0], "an isolated class isolates all of its request"


def test_a_request_pins_its_prompt(engine: Any) -> None:
    """Pinned blocks stay while as many others as host memory holds go through it; the same prompt renews its pin."""
    first = engine.generate(prompts=[prompt(72)], control={"pin": {"name": "manual", "ttl": "1h"}, "ceiling": "g2"})[0]
    before = engine.stats()["g2"]["evictions"]
    for seed in range(80, 116):
        engine.generate(prompts=[prompt(seed, 500)], tokens=1, control={"ceiling": "g2"})
    assert engine.stats()["g2"]["evictions"] > before + 9, "the control: blocks had to leave"
    assert engine.resident(prompt=prompt(72))[0] == 9
    again = engine.generate(prompts=[prompt(72)], control={"pin": {"name": "manual", "ttl": "2h"}})[0]
    assert "refused" not in first["answer"]["pin"] and again["answer"]["pin"]["name"] == "manual"
    assert again["tokens"] == first["tokens"] and engine.pins(count=1) == {"manual": 9}
    taken = engine.generate(prompts=[prompt(73)], control={"pin": {"name": "manual", "ttl": "2h"}})[0]
    engine.generate(prompts=[prompt(73)], control={"pin": {"name": "manual", "ttl": "2h"}}, salt="a")
    assert "until" not in taken["answer"]["pin"], "the name belongs to another prompt"
    pins = engine.pins(count=2)
    assert len(pins) == 2 and pins["manual"] == 9, "another tenant's names are its own"
    engine.unpin()
    assert engine.check() == IDLE


def action(kind: str, **payload: Any) -> dict[str, Any]:
    return {"action_id": kind, "action_type": kind, "action_version": "1.0", "payload": payload}


def resident_in_time(engine: Any, tokens: list[int], blocks: int) -> bool:
    deadline = time.monotonic() + 10
    while engine.resident(prompt=tokens)[0] != blocks and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(engine.resident(prompt=tokens)[0] == blocks)


def test_hints_of_requests_are_carried_out(engine: Any) -> None:
    """As vLLM's own envelope and session, and as other APIs' fields beside kvtier's parameters."""
    asked = prompt(74)
    hinted = [action("kv.share"), action("kv.retain", directives=[{"end": 64, "priority": 80, "duration": 60}])]
    answer = engine.hint(prompt=asked, actions=hinted, session="agent")
    said = {one["action"]: one["outcome"] for one in answer["hints"]}
    assert said["kv.share"] == "ignored" and said["kv.retain"] in ("accepted", "deferred"), answer
    assert engine.flush()["pending"] == 0 and resident_in_time(engine, asked, 9)
    engine.hint(prompt=[5], actions=[action("kv.demote", session_id="agent")])
    assert resident_in_time(engine, asked, 2), "what is kept stays, the rest is on the disk"
    engine.hint(prompt=[5], actions=[action("kv.prefetch", session_id="agent")], salt="a")
    foreign = engine.hint(prompt=[5], actions=[action("kv.prefetch", session_id="agent")], salt="a")
    assert foreign["hints"][0]["outcome"] in ("rejected", "deferred") and engine.resident(prompt=asked)[0] == 2
    engine.hint(prompt=[5], actions=[action("kv.prefetch", session_id="agent")])
    assert resident_in_time(engine, asked, 9), "before the session goes on"
    beside = {"cache_control": {"type": "ephemeral", "ttl": "1h"}, "prompt_cache_key": "agent"}
    cached = engine.hint(prompt=asked, actions=[action("kv.release")], beside=beside)
    assert cached["hints"][0]["outcome"] in ("accepted", "deferred")
    refused = engine.hint(prompt=prompt(75), actions=[], beside={"cache_control": {"ttl": "2h"}})
    assert refused == {} and engine.resident(prompt=prompt(75))[0] == 0, "it may have asked for less than the default"
    assert engine.check() == IDLE


def test_a_request_learns_where_its_prompt_left_an_earlier_one(engine: Any) -> None:
    first = engine.generate(prompts=[prompt(71)])[0]
    changed = [*prompt(71)[:150], 7, *prompt(71)[151:]]
    other = engine.generate(prompts=[changed], control={"compared_with": first["id"]})[0]
    assert other["answer"]["same_tokens"] == 128, "four blocks of 32 before token 150"
    again = engine.generate(prompts=[changed], control={"usage": True, "retention": "1h"})[0]
    usage = again["answer"]["usage"]
    assert usage["cached_tokens"] == again["cached"] == 288 == sum(usage["by_tier"].values())
    assert usage["by_tier"].get("g1", 0) == 288 - sum(again["read"].values()) and usage["cache_creation"] == {}
    unknown = engine.generate(prompts=[changed], control={"compared_with": "nobody"})[0]
    assert unknown["answer"]["same_tokens"] is None
    foreign = engine.generate(prompts=[prompt(71)], control={"compared_with": first["id"]}, salt="a")[0]
    assert foreign["answer"]["same_tokens"] is None, "no answer names requests of another tenant"


def test_new_weights_in_place_end_everything_stored_before(engine: Any) -> None:
    engine.generate(prompts=[prompt(18)])
    before = engine.namespace()
    assert engine.reset(connector=True)
    assert engine.open_anew()
    assert engine.namespace()["epoch"] and engine.namespace() != before
    cold = engine.generate(prompts=[prompt(18)])[0]
    assert cold["read"] == {} and before["epoch"] == ""
    assert engine.reset()
    warm = engine.generate(prompts=[prompt(18)])[0]
    assert warm["read"] == {"g2": 288} and warm["tokens"] == cold["tokens"]


def test_an_error_inside_the_connector_costs_hits_only(engine: Any) -> None:
    right = engine.generate(prompts=[prompt(19)])
    assert engine.reset()
    engine.break_scheduler()
    assert tokens(engine.generate(prompts=[prompt(19)], settle=False)) == tokens(right)
    engine.mend()
    again = engine.generate(prompts=[prompt(19)])
    assert tokens(again) == tokens(right)
    assert engine.check() == IDLE
