"""Copies between a real vLLM engine's pool and host memory: late, failed, overtaken, cut off.

The engine is that of test_engine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm.support.prompts import IDLE, keeps_accounts, prompt, tiers, tokens

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("mended")]


def test_a_failed_copy_costs_time_and_nothing_else(engine: Any) -> None:
    prompts = [prompt(8), prompt(9), prompt(10)]
    cold = engine.generate(prompts=prompts)
    before, reported = engine.counters(), engine.sources()
    assert engine.reset()
    engine.break_loads(how="fail", positions=[4])
    warm = engine.generate(prompts=prompts)
    engine.mend()
    assert tokens(warm) == tokens(cold)
    assert engine.counters()["load_failures"] - before.get("load_failures", 0) == 1
    assert sorted(out["read"].get("g2", 0) for out in warm) == [128, 288, 288], "one is cut at its first bad block"
    if keeps_accounts():
        ours, theirs = (
            engine.sources()[name] - reported.get(name, 0)
            for name in ("vllm:kvtier_tokens_read:g2", "vllm:external_prefix_cache_hits")
        )
        assert (ours, theirs) == (128 + 288 + 288, 3 * 288), "vLLM counts what was computed again, too"
        assert engine.sources()["vllm:kvtier_events:load_failures"] == engine.counters()["load_failures"]
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
    reported = [out for name, out in calls if name == "start"]
    stores = [name for name, _ in calls if name in ("start", "store")]
    assert reported == sorted(set(reported)), "one description per step"
    assert stores == ["start", "store"] * len(reported), "each step of the worker has both, with or without a forward"
    assert engine.check() == IDLE


@pytest.mark.parametrize("shared", [False, True], ids=["its own", "a shared one"])
def test_a_block_that_goes_bad_under_a_running_request_is_computed_again(engine: Any, shared: bool) -> None:
    """What a load inside the step does when it fails: the request stays, nothing computed over the bad block counts."""
    prompts = [prompt(43 + shared, 200) + prompt(45 + i, 60) for i in range(2)] if shared else [prompt(43, 200)]
    right = [engine.generate(prompts=[p], control={"load": False, "store": False})[0]["tokens"] for p in prompts]
    assert engine.reset()
    for number, one in enumerate(prompts):
        engine.add(name=f"sick{number}", prompt=one, load=False)  # the first one must not end while the second waits
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


def test_nothing_computed_over_a_bad_block_is_kept_when_its_request_goes_away(engine: Any) -> None:
    """A running request learns that a block of its prompt is bad, and is aborted before it computes anything again: the
    engine frees what it had computed over the bad block, under valid names."""
    asked = prompt(120, 200)
    right = engine.generate(prompts=[asked], control={"load": False, "store": False})
    assert engine.reset()
    engine.add(name="sick", prompt=asked)
    engine.steps_until_placed(name="sick")
    engine.steps(count=2)
    assert engine.check()["dirty"] == 6, "the control: all of them would have been kept"
    engine.spoil(name="sick", positions=[2])
    engine.steps(count=1)
    engine.abort(name="sick")
    engine.steps(count=3)
    engine.settle()
    assert engine.resident(prompt=asked) == [2, 2]
    engine.generate(prompts=[[*asked, *prompt(121, 60)]])  # may build upon what the engine still has
    assert engine.resident(prompt=[*asked, *prompt(121, 60)])[0] in (2, 8)
    assert engine.reset()
    warm = engine.generate(prompts=[asked])
    assert tokens(warm) == tokens(right)
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


def test_every_time_an_engine_becomes_idle_it_copies_all_that_is_left(engine: Any) -> None:
    """One block per step, so that idle steps are needed; idle times that outlast `flush_timeout`."""
    engine.limit(step_bytes=1, flush_timeout_s=1.0)
    for turn in range(3):
        engine.generate(prompts=[prompt(124 + turn)])
        assert engine.check() == IDLE and engine.resident(prompt=prompt(124 + turn))[0] == 9
        assert not engine.pending()
        engine.sleep(seconds=1.1)
    engine.limit(step_bytes=64 << 20, flush_timeout_s=3.0)


def test_an_idle_engine_steps_until_a_load_that_nobody_waits_for_has_ended(engine: Any) -> None:
    """Its blocks belong to the engine again only then; until that the prefix cache cannot be reset."""
    engine.generate(prompts=[prompt(122)])
    assert engine.reset()
    engine.hold_copies()
    engine.add(name="gone", prompt=prompt(122))
    engine.steps_until_placed(name="gone")
    engine.abort(name="gone")
    engine.steps(count=3)
    assert engine.check()["blocks_used"] > 0 and not engine.reset()
    assert engine.pending()
    engine.mend()
    engine.settle()
    assert engine.check() == IDLE and not engine.pending()
    assert engine.reset()


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


def test_the_same_content_in_the_same_block_is_another_tenancy(engine: Any) -> None:
    """Nine blocks are handed out and filled with the same tokens again before they are copied: their names are equal,
    the name objects are not, and whether the copy saw a finished block is not known."""
    engine.hold_stores()
    engine.generate(prompts=[prompt(119)], tokens=2, settle=False)
    engine.steps(count=3)
    blocks = engine.copied_from()
    assert len(blocks) == 9
    assert engine.reset()
    engine.hand_out_next(blocks=blocks)
    lost = engine.counters()["spill_lost"]
    engine.generate(prompts=[prompt(119)], tokens=2, settle=False, control={"load": False, "store": False})
    assert engine.renamed() >= 8, "the control"
    engine.mend()
    engine.settle()
    assert engine.counters()["spill_lost"] == lost + 9
    assert engine.resident(prompt=prompt(119)) == [0, 0]
    assert engine.check() == IDLE


def test_blocks_are_copied_ahead_of_their_reuse_and_not_before(engine: Any) -> None:
    """Twelve prompts of 14 blocks through a pool of 127, with `offload.mode: lazy`: what is about to be handed out has
    been copied, what was filled last has not."""
    assert engine.limits()["spill_ahead_blocks"] == 32, (
        "four steps of 512 tokens could take 64, a quarter of the pool is 32"
    )
    assert engine.reset()
    engine.offload(mode="lazy")
    before = engine.counters()
    prompts = [prompt(130 + i, 450) for i in range(12)]
    for one in prompts:
        engine.generate(prompts=[one], tokens=2, settle=False)
    assert engine.counters().get("spill_lost", 0) == before.get("spill_lost", 0), (
        "each was copied before it was handed out"
    )
    first, last = (engine.resident(prompt=prompts[i])[0] for i in (0, -1))
    assert (first, last) == (14, 0)
    engine.offload(mode="auto")
    engine.settle()
    assert engine.resident(prompt=prompts[-1])[0] == 14
    assert engine.check() == IDLE


def test_a_prefix_reset_with_copies_in_flight(engine: Any) -> None:
    """What is copied late is found nowhere."""
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


def test_new_weights_with_copies_in_flight_in_both_directions(engine: Any) -> None:
    """They end with their arena: a load as one that failed, a store as nothing. No slot of the next arena hears of
    them."""
    engine.generate(prompts=[prompt(150)])
    assert engine.reset()
    engine.hold_copies()
    engine.generate(prompts=[prompt(151)], tokens=2, settle=False)
    engine.steps(count=2)
    engine.add(name="loading", prompt=prompt(150))
    engine.steps_until_placed(name="loading")
    state = engine.check()
    assert state["storing"] == 1 and state["loading"] == 1
    assert not engine.reset(connector=True), "a request has blocks"
    assert engine.open_anew()
    ended = engine.run_out()
    engine.mend()
    engine.settle()
    assert engine.reset(), "its own blocks, which are of before"
    fresh = engine.generate(prompts=[prompt(150), prompt(151)])
    assert [out["read"] for out in fresh] == [{}, {}]
    assert ended["loading"] == fresh[0]["tokens"]
    assert engine.reset()
    warm = engine.generate(prompts=[prompt(150), prompt(151)])
    assert tokens(warm) == tokens(fresh) and [out["read"] for out in warm] == [{"g2": 288}] * 2
    assert engine.check() == IDLE


@pytest.mark.parametrize("caching", [True, pytest.param(False, marks=pytest.mark.long)])
def test_an_engine_sleeps_and_wakes(
    request: pytest.FixtureRequest, start: Callable[..., Any], tmp_path: Path, caching: bool
) -> None:
    """As far as a CPU can: a pause that clears caches, tensors that lose their content, and copies in flight. What was
    stored is found again only where `keep_on_reset` says that the weights are the same. Without prefix caching copies
    hold blocks: the engine steps until it has them before it clears its caches, as any in a process of its own does."""
    engine = request.getfixturevalue("engine") if caching else None
    if engine is None:
        options = {"arguments": {"in_step_bytes": 0}, "engine": {"enable_prefix_caching": False}}
        engine = start(config={**tiers(tmp_path), "deadlines": {"lookup": "1s"}}, **options)
    cold = engine.generate(prompts=[prompt(155), prompt(156)])
    for keep, read in ((False, {}), (True, {"g3": 288})):
        engine.flush()
        engine.keep_on_reset(keep=keep)
        engine.hold_copies()
        engine.generate(prompts=[prompt(157 + keep)], tokens=2, settle=False)
        engine.steps(count=2)
        if not caching:
            engine.settle()
        engine.doze()
        engine.mend()
        engine.wake()
        assert engine.open_anew()
        warm = engine.generate(prompts=[prompt(155), prompt(156)])
        assert tokens(warm) == tokens(cold) and [out["read"] for out in warm] == [read] * 2
    engine.keep_on_reset(keep=False)
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
    engine.generate(prompts=[prompt(1, 500)])
    assert engine.reset()
    before = engine.counters()
    engine.hold_stores()
    engine.limit(ack_timeout_s=0.2)
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
    engine.limit(ack_timeout_s=30.0)
    engine.resume_offload()
    engine.settle()
    assert engine.check() == IDLE


def test_more_blocks_than_the_pool_has(engine: Any) -> None:
    """Preemption, eviction from the pool, spilling ahead of reuse: five prompts of 23 blocks that grow to 27, on a pool
    of 127. Then the same with all copies out delayed until their blocks hold something else."""
    prompts = [prompt(30 + i, 736) for i in range(5)]
    cold = [engine.generate(prompts=[p], tokens=110, control={"load": False, "store": False})[0] for p in prompts]
    for held in (False, True):
        assert engine.reset()
        reported = engine.sources()
        if held:
            engine.hold_stores()
        together = engine.generate(prompts=prompts, tokens=110, settle=False, control={"load": held})
        assert tokens(together) == tokens(cold)
        assert engine.sources()["vllm:num_preemptions"] > reported.get("vllm:num_preemptions", 0)
        engine.mend()
        engine.settle()
        assert engine.check() == IDLE
    for turn in range(2):
        assert engine.reset()
        alone = [engine.generate(prompts=[p], tokens=110)[0] for p in prompts]
        assert tokens(alone) == tokens(cold), f"turn {turn}"
    assert all(out["read"] for out in alone)
    assert engine.check() == IDLE
