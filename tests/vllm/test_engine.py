"""The connector in a real vLLM engine: the same tokens out, whatever happens to the cache.

One engine with scheduler and worker in its process serves all scenarios, so that they can look inside; the last test
starts a second engine, as vLLM runs it, over what the first left on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)

BLOCK = 32
IDLE = {"visits": 0, "loading": 0, "storing": 0, "dirty": 0, "pinned": 0, "quarantined": 0, "blocks_used": 0,
        "forgotten": 0}  # fmt: skip


def prompt(seed: int, length: int = 300) -> list[int]:
    return [(i * 7919 + seed * 104729 + (i * seed) % 17) % 1000 + 3 for i in range(length)]


def tokens(outs: list[dict[str, Any]]) -> list[list[int]]:
    return [out["tokens"] for out in outs]


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
    assert engine.evict(tier="g2") > 0
    assert engine.reset()
    warm = engine.generate(prompts=[prompt(4)])
    assert tokens(warm) == tokens(cold) and warm[0]["read"] == {"g3": 288}
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


LABELS = (("locality", "LOCAL"), ("ownership", "kvtier"))


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
    local, ours = (value if name in fields_of_events() else None for name, value in LABELS)
    assert {event["ownership"] for event in heard} == {ours}
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
    assert plain["tokens"] == warm["tokens"]


def test_concurrent_requests_over_a_shared_prefix(engine: Any) -> None:
    prompts = [prompt(7, 200) + prompt(20 + i, 90) for i in range(6)]
    alone = [engine.generate(prompts=[p])[0] for p in prompts]
    assert engine.reset()
    together = engine.generate(prompts=prompts)
    assert tokens(together) == tokens(alone)
    assert all(out["cached"] >= 192 for out in together)
    assert engine.check() == IDLE


def test_a_failed_copy_costs_time_and_nothing_else(engine: Any) -> None:
    prompts = [prompt(8), prompt(9), prompt(10)]
    cold = engine.generate(prompts=prompts)
    before = engine.counters()
    assert engine.reset()
    engine.break_loads(how="fail", positions=[4])
    warm = engine.generate(prompts=prompts)
    engine.mend()
    assert tokens(warm) == tokens(cold)
    assert engine.counters()["load_failures"] - before.get("load_failures", 0) == 1
    assert sorted(out["read"].get("g2", 0) for out in warm) == [128, 288, 288], "one is cut at its first bad block"
    assert engine.check() == IDLE


def test_the_smallest_bad_block_of_a_load_wins(engine: Any) -> None:
    cold = engine.generate(prompts=[prompt(40)])
    assert engine.reset()
    engine.break_loads(how="fail", positions=[6, 2, 4])
    warm = engine.generate(prompts=[prompt(40)])
    engine.mend()
    assert tokens(warm) == tokens(cold) and warm[0]["read"] == {"g2": 64}
    assert engine.check() == IDLE


def test_a_load_is_asked_for_once_and_never_inside_a_step(engine: Any) -> None:
    """The order of calls of an asynchronous load; synchronous ones, which may leave named blocks without content, are
    never asked for."""
    engine.generate(prompts=[prompt(41)])
    assert engine.reset()
    engine.record_calls()
    engine.generate(prompts=[prompt(41), prompt(42)])
    calls = engine.calls()
    answers = [out for name, out in calls if name == "match"]
    assert [288, True] in answers and all(not loads for count, loads in answers if not count)
    assert all(loads for count, loads in answers if count)
    assert [out for name, out in calls if name == "allocated"] == [288, 0, 0], "the loaded one comes twice"
    told = [out for name, out in calls if name == "start"]
    stores = [name for name, _ in calls if name in ("start", "store")]
    assert told == sorted(set(told)), "one description per step"
    assert stores == ["start", "store"] * len(told), "each step of the worker has both, also those without a forward"
    assert engine.check() == IDLE


@pytest.mark.parametrize("shared", [False, True], ids=["its own", "a shared one"])
def test_a_block_that_goes_bad_under_a_running_request_is_computed_again(engine: Any, shared: bool) -> None:
    """What a load inside the step does when it fails: the request stays, nothing computed over the bad block counts."""
    prompts = [prompt(43 + shared, 200) + prompt(45 + i, 60) for i in range(2)] if shared else [prompt(43, 200)]
    right = [engine.generate(prompts=[p], control={"load": False, "store": False})[0]["tokens"] for p in prompts]
    assert engine.reset()
    for number, one in enumerate(prompts):
        engine.add(name=f"sick{number}", prompt=one)
        engine.steps_until_placed(name=f"sick{number}")
    engine.steps(count=2)
    engine.spoil(name="sick0", positions=[2, 4])
    finished = engine.run_out()
    assert [finished[f"sick{number}"] for number in range(len(prompts))] == right
    engine.settle()
    assert engine.reset()
    again = engine.generate(prompts=prompts)
    assert tokens(again) == right and all(sum(out["read"].values()) >= 192 for out in again)
    assert engine.check() == IDLE


def test_nothing_of_a_failed_load_is_kept_when_its_request_goes_away(engine: Any) -> None:
    """The load of three blocks fails and leaves sevens everywhere; the request is aborted before it recomputes."""
    assert engine.generate(prompts=[prompt(11)[:100]])[0]["read"] == {}
    assert engine.reset()
    stored = engine.stored_blocks()
    engine.break_loads(how="fail", positions=[0, 1, 2])
    engine.add(name="doomed", prompt=prompt(11))
    engine.steps_until_placed(name="doomed")
    engine.abort(name="doomed")
    engine.steps(count=3)
    engine.mend()
    engine.settle()
    assert engine.stored_blocks() == stored
    assert engine.named_in_pool(prompt=prompt(11)) == 0, "they never entered the engine's own cache"
    cold = engine.generate(prompts=[prompt(11)], control={"load": False, "store": False})
    assert engine.reset()
    warm = engine.generate(prompts=[prompt(11)])
    assert warm[0]["read"] == {"g2": 96} and tokens(warm) == tokens(cold)
    assert engine.check() == IDLE


def test_an_abort_while_loading_leaves_nothing_behind(engine: Any) -> None:
    cold = engine.generate(prompts=[prompt(12)])
    assert engine.reset()
    engine.break_loads(how="hang")
    engine.add(name="loading", prompt=prompt(12))
    engine.steps_until_placed(name="loading")
    engine.steps(count=1)
    assert engine.check()["loading"] == 1
    engine.abort(name="loading")
    engine.mend()
    engine.settle()
    assert engine.check() == IDLE
    assert tokens(engine.generate(prompts=[prompt(12)])) == tokens(cold)


def test_a_block_that_is_handed_out_again_during_its_copy_is_not_published(engine: Any) -> None:
    """The copy of a block and the next use of it overlap: its content is not known to be the old one."""
    assert engine.reset()
    engine.add(name="one", prompt=prompt(13, 100), tokens=2)
    engine.run_out()
    engine.steps(count=0)
    before = engine.counters()
    assert engine.reset(), "an unfinished copy must not keep the engine from resetting"
    engine.settle()
    assert engine.counters()["spill_lost"] > before.get("spill_lost", 0)
    assert engine.resident(prompt=prompt(13, 100))[0] == 0
    assert engine.check() == IDLE


def test_a_block_that_others_fill_before_its_delayed_copy_is_not_published(engine: Any) -> None:
    """Copies of 9 blocks are held up until three long prompts have been through the pool."""
    small, large = prompt(48), [prompt(50 + i, 1500) for i in range(3)]
    right = [engine.generate(prompts=[p], control={"load": False, "store": False})[0] for p in (small, *large)]
    assert engine.reset()
    before = engine.counters()
    engine.hold_stores()
    engine.add(name="small", prompt=small, tokens=2)
    engine.run_out()
    engine.steps(count=3)
    assert engine.check()["storing"] > 0
    for one in large:
        engine.generate(prompts=[one], tokens=2, settle=False, control={"store": False})
    engine.mend()
    engine.settle()
    assert engine.counters()["spill_lost"] >= before.get("spill_lost", 0) + 9
    assert engine.resident(prompt=small)[0] == 0
    assert engine.reset()
    assert tokens([engine.generate(prompts=[p])[0] for p in (small, *large)]) == tokens(right)
    assert engine.check() == IDLE


def test_a_cache_reset_with_copies_in_flight(engine: Any) -> None:
    """The slots of the old arena are written late; nothing of it is found in the new one."""
    engine.hold_stores()
    engine.generate(prompts=[prompt(49)], settle=False)
    engine.steps(count=2)
    assert engine.check()["storing"] > 0
    assert engine.reset()
    assert engine.generate(prompts=[prompt(48)], settle=False)
    engine.mend()
    engine.settle()
    assert engine.resident(prompt=prompt(49))[0] == 0
    assert engine.check() == IDLE


def test_blocks_are_visible_once_every_rank_has_written_them(engine: Any) -> None:
    engine.second_rank(present=True)
    engine.generate(prompts=[prompt(60)], settle=False)
    engine.steps(count=6)
    assert engine.resident(prompt=prompt(60)) == [0, 0]
    assert engine.answer_of_second_rank() > 0
    assert engine.resident(prompt=prompt(60)) == [9, 9]
    engine.generate(prompts=[prompt(61)], settle=False)
    engine.steps(count=6)
    engine.answer_of_second_rank(failed=3)
    assert engine.resident(prompt=prompt(61))[0] == 3, "what failed on one rank is there on none"
    engine.second_rank(present=False)
    engine.settle()
    assert engine.check() == IDLE


def test_a_rank_that_stops_answering_ends_offloading_and_nothing_else(engine: Any) -> None:
    before = engine.counters()
    engine.hold_stores()
    engine.limit(ack_timeout=0.2)
    engine.generate(prompts=[prompt(62)], settle=False)
    engine.steps(count=3)
    engine.sleep(seconds=0.3)
    right = engine.generate(prompts=[prompt(1, 500)], settle=False)[0]
    assert engine.counters()["copies_abandoned"] - before.get("copies_abandoned", 0) >= 9
    assert engine.check()["quarantined"] >= 9, "nobody may write where a lost copy still might"
    assert right["read"] != {}, "what is there is read on"
    stored = engine.counters()["blocks_stored"]
    engine.generate(prompts=[prompt(63)], settle=False)
    engine.steps(count=4)
    assert engine.counters()["blocks_stored"] == stored and engine.resident(prompt=prompt(63)) == [0, 0]
    engine.mend()  # it answers after all, with the next steps: the memory is free again, offloading stays off
    engine.generate(prompts=[prompt(63)], settle=False)
    assert engine.check()["quarantined"] == 0 and engine.resident(prompt=prompt(62)) == [0, 0]
    engine.limit(ack_timeout=30.0)
    engine.resume_offload()
    engine.settle()
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
    engine.limit(lookup_deadline=0.2)
    late = engine.counters().get("lookups_late", 0)
    out = engine.timed(prompts=[prompt(65)], tokens=24)
    engine.limit(lookup_deadline=30.0)
    engine.sicken(tier="g3", how="")
    assert out["tokens"] == tokens(right) and out["seconds"] < 5
    assert engine.counters()["lookups_late"] == late + 1
    engine.sleep(seconds=0.2)
    engine.settle()


def test_what_would_arrive_later_than_prefill_takes_is_computed(engine: Any) -> None:
    right = engine.generate(prompts=[prompt(66, 500)])[0]
    engine.flush()
    engine.limit(weighs=True)
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
    engine.limit(weighs=False)
    engine.pretend(tier="g3", seconds_per_block=None)


def test_more_blocks_than_the_pool_has(engine: Any) -> None:
    """Preemption, eviction from the pool, spilling ahead of reuse: 8 prompts of 20 blocks on a pool of 127."""
    prompts = [prompt(30 + i, 630) for i in range(8)]
    cold = [engine.generate(prompts=[p], tokens=40)[0] for p in prompts]
    together = engine.generate(prompts=prompts, tokens=40)
    assert tokens(together) == tokens(cold)
    assert sum(sum(out["read"].values()) for out in together) > 600 * 4
    assert engine.check() == IDLE


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
    assert "refused" not in first["told"]["pin"] and again["told"]["pin"]["name"] == "manual"
    assert again["tokens"] == first["tokens"] and engine.pins(count=1) == {"manual": 9}
    taken = engine.generate(prompts=[prompt(73)], control={"pin": {"name": "manual", "ttl": "2h"}})[0]
    engine.generate(prompts=[prompt(73)], control={"pin": {"name": "manual", "ttl": "2h"}}, salt="a")
    assert "until" not in taken["told"]["pin"], "the name belongs to another prompt"
    pins = engine.pins(count=2)
    assert len(pins) == 2 and pins["manual"] == 9, "another tenant's names are its own"
    engine.unpin()
    assert engine.check() == IDLE


def test_a_request_learns_where_its_prompt_left_an_earlier_one(engine: Any) -> None:
    first = engine.generate(prompts=[prompt(71)])[0]
    changed = [*prompt(71)[:150], 7, *prompt(71)[151:]]
    other = engine.generate(prompts=[changed], control={"compared_with": first["id"]})[0]
    assert other["told"]["same_tokens"] == 128, "four blocks of 32 before token 150"
    unknown = engine.generate(prompts=[changed], control={"compared_with": "nobody"})[0]
    assert unknown["told"]["same_tokens"] is None
    foreign = engine.generate(prompts=[prompt(71)], control={"compared_with": first["id"]}, salt="a")[0]
    assert foreign["told"]["same_tokens"] is None, "nothing is told of requests of another tenant"


def test_new_weights_in_place_end_everything_stored_before(engine: Any) -> None:
    engine.generate(prompts=[prompt(18)])
    before = engine.namespace()
    assert engine.reset(connector=True)
    for _ in range(50):
        engine.sleep(seconds=0.1)
        if engine.namespace()["epoch"] and engine.namespace() != before:
            break
    cold = engine.generate(prompts=[prompt(18)])[0]
    assert cold["read"] == {} and before["epoch"] == ""
    engine.sleep(seconds=0.5)
    assert engine.reset()
    warm = engine.generate(prompts=[prompt(18)])[0]
    assert warm["read"] == {"g2": 288} and warm["tokens"] == cold["tokens"]


def test_an_error_inside_the_connector_costs_hits_only(engine: Any) -> None:
    right = engine.generate(prompts=[prompt(19)])
    assert engine.reset()
    engine.break_scheduler()
    assert tokens(engine.generate(prompts=[prompt(19)], settle=False)) == tokens(right)
    engine.mend()


def test_a_fresh_process_finds_what_the_last_one_wrote(
    engine: Any, start: Callable[..., Any], config: dict[str, Any]
) -> None:
    """G2 is lost with the process, G3 is warm; the second engine runs in processes of its own, as in production."""
    fresh_stop = engine.stop()
    assert fresh_stop == 0
    second = start(config=config, processes="own")
    warm = second.generate(prompts=[prompt(4)])[0]
    assert warm["read"] == {"g3": 288}
    cold = second.generate(prompts=[prompt(4)], control={"load": False})[0]
    assert cold["tokens"] == warm["tokens"]
    assert second.stop() == 0
