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
IDLE = {"visits": 0, "loading": 0, "storing": 0, "dirty": 0, "pinned": 0, "quarantined": 0, "blocks_used": 0}


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


def test_routers_hear_where_blocks_lie(engine: Any) -> None:
    asked = prompt(50, 200)
    engine.heard()
    engine.generate(prompts=[asked])
    assert engine.flush()["pending"] == 0
    engine.generate(prompts=[[5]])  # events leave with a step
    heard = [event for event in engine.heard() if event["ownership"] == "kvtier"]
    for medium in ("CPU", "STORAGE"):
        stored = [event for event in heard if event["kind"] == "BlockStored" and event["medium"] == medium]
        mine = {event["hashes"][0]: event for event in stored if event["tokens"] and event["locality"] == "LOCAL"}
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


def test_nothing_of_a_failed_load_is_kept_when_its_request_goes_away(engine: Any) -> None:
    """The load of three blocks fails and leaves sevens everywhere; the request is aborted before it recomputes."""
    assert engine.generate(prompts=[prompt(11)[:100]])[0]["read"] == {}
    assert engine.reset()
    stored = engine.stored_blocks()
    engine.break_loads(how="fail", positions=[0, 1, 2])
    engine.add(name="doomed", prompt=prompt(11))
    engine.steps(count=1)
    engine.abort(name="doomed")
    engine.steps(count=3)
    engine.mend()
    engine.settle()
    assert engine.stored_blocks() == stored
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
    engine.steps(count=2)
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
