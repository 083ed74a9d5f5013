"""Requests before their admission: what is waited for, on all ranks alike, and what is recorded and answered."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from kvtier.clock import SystemClock
from kvtier.connectors.promoted import Promoted
from kvtier.connectors.sglang.requests import put_answer
from tests.connectors.sglang.support.linker_bench import PAGE, keys_of
from tests.support.waiting import eventually


def stored_below(b: Any, keys: list[Any]) -> Any:
    """The cache, whose tiers below G2 alone have the keys' pages."""
    b.offload(keys, [*range(1, len(keys) + 1)])
    b.settle()
    cache = b.linker._pages.cache
    cache.flush()
    cache.evict("g2")
    return cache


def test_what_is_deeper_is_waited_for_and_verified(bench: Any) -> None:
    b, keys = bench(), keys_of(6)
    b.offload(keys, [1, 2, 3, 4, 5, 6])
    b.settle()
    expected = [b.bytes_of(p) for p in range(1, 7)]
    cache = b.linker._pages.cache
    cache.flush()
    cache.evict("g2")
    assert b.lookup("r", keys) == 0
    assert b.until_resident("r", keys) == 6
    assert b.linker.load("r", b.transfer(keys, [11, 12, 13, 14, 15, 16]))
    assert b.run()
    assert [b.bytes_of(p) for p in range(11, 17)] == expected
    b.linker.forget("r")
    assert b.pinned() == 0


def test_a_request_waits_for_all_ranks_and_only_once(bench: Any) -> None:
    b, keys = bench(), keys_of(3)
    answers = []
    for b.refusals in (1, 0):
        b.until_promoted("r", keys)
        answers.append(b.linker.awaited("r"))
    assert answers == [True, False]
    b.refusals = 1
    assert not b.linker.awaited("r")
    assert b.refusals == 1  # who is decided on is not voted on again


def test_nobody_waits_for_what_the_device_has_by_now_or_beyond_its_time(bench: Any, monkeypatch: Any) -> None:
    b, keys = bench(), keys_of(3)
    for rid in ("r", "s"):
        b.lookup(rid, keys)
        b.linker._requests.of(rid).promoted, b.linker._requests.of(rid).waits = Promoted(Future()), True
        assert b.linker.awaited(rid)
    b.linker.before_lookup(b.req("r"), lambda: keys, b.vote)  # another request computed the same: no look-up comes
    assert not b.linker.awaited("r")
    assert b.linker.awaited("s")
    b.linker._requests.of("s").until_s = time.monotonic()
    assert not b.linker.awaited("s")


def test_a_queue_of_more_requests_than_are_remembered_moves_on(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that is admitted makes room for one that waits its time."""
    from kvtier.connectors.sglang import requests

    monkeypatch.setattr(requests, "_REQUESTS_MAX", 2)
    b, queue = bench(), ["a", "b", "c", "d"]
    monkeypatch.setattr(b.linker._requests, "_promote", lambda *_: Promoted(Future()))
    for seed in range(3):
        before = len(queue)
        for rid in list(queue):
            b.lookup(rid, keys_of(3, seed=ord(rid)))
            if not b.linker.awaited(rid):
                queue.remove(rid)
                b.linker.admitted(b.req(rid))
        assert len(queue) < before or len(queue) == 2, seed
    assert len(queue) == 2


def test_ranks_vote_on_a_request_also_where_one_has_no_cache(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    b, keys = bench(), keys_of(3)
    monkeypatch.setattr(b.linker._rotation, "current", None)
    assert b.lookup("r", keys) == 0
    b.refusals = 1
    assert b.linker.awaited("r")
    assert b.refusals == 0


def test_an_aborted_request_lets_go_of_its_promotion(bench: Any) -> None:
    b, keys = bench(), keys_of(6)
    cache = stored_below(b, keys)
    b.lookup("r", keys)
    b.linker.forget("r")
    assert b.until_resident("s", keys) == 6
    b.linker.forget("s")
    assert b.pinned() == 0
    cache.check()


def test_tokens_are_recorded_by_the_tier_they_came_from(bench: Any) -> None:
    b, keys = bench(), keys_of(6)
    stored_below(b, keys)
    b.offload(keys[:2], [1, 2])
    b.settle()
    b.until_promoted("r", keys)
    assert b.linker.load("r", b.transfer(keys, [11, 12, 13, 14, 15, 16]))
    b.linker.admitted(b.req("r"))
    assert b.run()
    assert b.linker.stats()["engine"]["tokens_read"] == {"g2": 2 * PAGE, "g3": 4 * PAGE}
    b.until_promoted("s", keys_of(3, 1))
    b.linker.admitted(b.req("s"))
    requests = b.linker.stats()["requests"]
    assert (requests["lookups"], requests["hits"], requests["misses"]) == (9, 6, {"absent": 3})
    assert b.pinned() == 0


def test_blocks_are_not_taken_before_it_is_known_where_they_came_from(bench: Any) -> None:
    b, keys = bench(), keys_of(3)
    b.offload(keys, [1, 2, 3])
    b.settle()
    cache = b.linker._pages.cache
    cache.flush()
    cache.evict("g2")
    b.lookup("r", keys)
    state = b.linker._requests.of("r")
    promotion, state.promoted.future = state.promoted.future, Future()
    wait([promotion], 10)  # all is in G2, and the promotion has not said so yet
    assert b.lookup("r", keys) == 3 and state.waits
    state.promoted.future.set_result(promotion.result())
    assert b.lookup("r", keys) == 3 and not state.waits
    b.linker.load("r", b.transfer(keys, [11, 12, 13]))
    b.linker.admitted(b.req("r"))
    assert b.run()
    assert b.linker.stats()["engine"]["tokens_read"] == {"g3": 3 * PAGE}


def test_prompts_are_pinned_whether_they_are_looked_up_or_on_the_device(bench: Any) -> None:
    b, keys, asked = bench(), keys_of(4), {"name": "manual", "ttl": "1h"}
    cache = b.linker._pages.cache
    b.lookup("r", keys[2:], head=keys[:2], pin=asked)
    b.linker.admitted(b.req("r"))
    known = b.req("s", pin={"name": "hot", "ttl": "1h"}, load=False)
    for req in (known, b.req("t")):  # no look-up comes
        b.linker.before_lookup(req, lambda: keys[:3], b.vote)
        b.linker.admitted(req)
    assert eventually(lambda: len(cache.pins.list()) == 2)
    assert {pin.name: pin.blocks for pin in cache.pins.list()} == {"manual": 4, "hot": 3}
    b.offload(keys, [1, 2, 3, 4])
    b.settle()
    assert {pin.name: pin.resident for pin in cache.pins.list()} == {"manual": 4, "hot": 3}
    answer = lambda: next(iter(known.customized_info.values()))[0]  # noqa: E731
    assert eventually(lambda: "until" in answer()["pin"]), "it changes when the pin is on disk"
    reported = answer()
    assert reported["pin"]["name"] == "hot" and reported["pin"]["until"] > 0


def test_answers_say_what_was_read_and_how_far_prompts_agree(bench: Any) -> None:
    b, keys = bench(), keys_of(4)
    b.offload(keys, [1, 2, 3, 4])
    b.settle()
    first, same, other = b.req("first"), b.req("same", compared_with="first"), b.req("other", compared_with="first")
    unknown = b.req("unknown", compared_with="first", salt="alice")
    counted = b.req("counted", usage=True, retention="1h")
    parted, reported = [*keys[:2], *keys_of(2, 1)], []
    for req, chain in ((first, keys), (same, keys), (other, parted), (unknown, keys), (counted, parted)):
        b.linker.before_lookup(req, list, b.vote)
        if hits := len(b.linker.lookup(req.rid, b.transfer(chain))):
            b.linker.load(req.rid, b.transfer(chain[:hits], [5, 6, 7, 8][:hits]))
        b.linker.admitted(req)
        b.run()
        reported += req.customized_info["kvtier"]
    usage = {"cached_tokens": 2 * PAGE, "by_tier": {"g2": 2 * PAGE}, "cache_creation": {"1h": 2 * PAGE}}
    assert reported == [
        {"tokens_read": {"g2": 4 * PAGE}},
        {"tokens_read": {"g2": 4 * PAGE}, "same_tokens": 4 * PAGE},
        {"tokens_read": {"g2": 2 * PAGE}, "same_tokens": 2 * PAGE},
        {"tokens_read": {}, "same_tokens": None},
        {"tokens_read": {"g2": 2 * PAGE}, "usage": usage},
    ]
    b.linker.before_lookup(first, list, b.vote)  # it was sent back to the queue, and comes again
    b.linker.lookup("first", b.transfer(keys))
    b.linker.load("first", b.transfer(keys, [5, 6, 7, 8]))
    b.linker.admitted(first)
    assert first.customized_info["kvtier"] == [{"tokens_read": {"g2": 8 * PAGE}}]


def test_a_request_s_time_runs_by_the_cache_s_clock_which_counts_suspension(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine slept: CLOCK_BOOTTIME is ahead of CLOCK_MONOTONIC, by which no deadline may be made."""
    slept_s = [1000.0]
    mono, wall = SystemClock.monotonic, SystemClock.wall
    monkeypatch.setattr(SystemClock, "monotonic", lambda clock: mono(clock) + slept_s[0])
    monkeypatch.setattr(SystemClock, "wall", lambda clock: wall(clock) + slept_s[0])
    b, keys = bench(), keys_of(6)
    cache = stored_below(b, keys)
    assert b.until_resident("r", keys) == 6, "its promotion got a deadline that the cache's clock had passed"
    queued = b.linker._requests.of("r")
    wait_s = b.linker._requests._wait_s
    assert 0 < queued.until_s - cache.manager.hierarchy.clock.monotonic() <= wait_s
    b.lookup("s", keys_of(6, 50))
    waiting = b.linker._requests.of("s")
    waiting.promoted, waiting.waits = Promoted(Future()), True
    assert b.linker.awaited("s")
    slept_s[0] += wait_s  # it sleeps again, while "s" waits
    assert not b.linker.awaited("s")


def test_an_admitted_request_is_remembered_with_what_it_was_given(bench: Any, tmp_path: Path) -> None:
    b, keys = bench(trace={"socket": str(tmp_path / "trace.sock")}), keys_of(6)
    cache = stored_below(b, keys)
    b.until_promoted("r", keys)
    assert b.linker.load("r", b.transfer(keys, [11, 12, 13, 14, 15, 16]))
    b.until_promoted("s", keys_of(3, 1))
    for rid, count in (("r", 6 * PAGE + 1), ("s", 3 * PAGE)):
        req = b.req(rid)
        req.origin_input_ids = list(range(count))
        b.linker.admitted(req)
    assert b.run()
    cache.submit(asyncio.sleep(0)).result(10)
    one, other = cache.journal.latest()
    assert (one.served.name, one.served.given, one.served.why) == ("r", {"g3": 6 * PAGE}, "")
    assert (other.served.name, other.served.given, other.served.why) == ("s", {}, "absent")
    assert one.tokens.tolist() == list(range(6 * PAGE + 1)) and len(one.tails) == 6 * 8
    assert one.served.placed_s is not None and 0 <= one.served.placed_s < 60 and one.served.first_s is None


def test_a_request_that_is_admitted_again_has_cached_what_it_found_first() -> None:
    """Its own blocks are on the device by then: they are no cached part of its prompt."""
    first = {"cached_tokens": 32, "by_tier": {"g2": 32}, "cache_creation": {"1h": 64}}
    again = {"cached_tokens": 96, "by_tier": {"g1": 96}, "cache_creation": {}}
    req = SimpleNamespace(customized_info=None)
    put_answer(req, {"tokens_read": {"g2": 32}, "usage": first})
    put_answer(req, {"tokens_read": {"g2": 16}, "usage": again})
    assert req.customized_info["kvtier"] == [{"tokens_read": {"g2": 48}, "usage": first}]


def test_a_reload_holds_for_later_requests(bench: Any) -> None:
    b = bench()
    requests, before = b.linker._requests, b.linker._rotation.config
    assert requests.control_of(b.req("r"))[0].terms.name == "24h"
    raw = before.model_copy(update={"retention": before.retention.model_copy(update={"default": "5m"})})
    b.linker._pages.cache.on_reload(raw)
    assert requests.control_of(b.req("s"))[0].terms.name == "5m" and b.linker._rotation.config is raw
    assert b.linker._pages.cache.source is None, "its configuration was no file"


def test_hints_and_the_session_come_as_sglang_has_them(bench: Any) -> None:
    """Its own envelope and session id, and other APIs' fields beside kvtier's parameters."""
    action = {"action_type": "kv.pin", "action_version": "1.0", "payload": {"name": "manual", "ttl_seconds": 60}}
    raw = {"protocol_version": "1.0", "message_id": "", "actions": [{"action_id": "a", **action}]}
    b = bench()
    from sglang.srt.managers.kv_hints import decode_kv_hints_envelope

    requests, req = b.linker._requests, b.req("r")
    req.kv_hints, req.session_id = decode_kv_hints_envelope(raw), "agent"
    req.sampling_params = SimpleNamespace(custom_params={"cache_control": {"ttl": "1h"}, "kvtier": {"usage": True}})
    control = requests.control_of(req)[0]
    assert (control.session, control.terms.name, control.usage) == ("agent", "1h", True)
    assert [one.verb.name for one in control.hints.actions] == ["manual"]
    req.kv_hints = decode_kv_hints_envelope({**raw, "actions": [{"action_id": "a", **action}] * 5000})
    control = requests.control_of(req)[0]
    assert not (control.load or control.store), "more than are looked at"


def test_a_sessions_hints_are_carried_out_and_answered(bench: Any) -> None:
    b, keys = bench(), keys_of(4)
    stored_below(b, keys)

    def asked(rid: str, *actions: tuple[str, dict[str, Any]]) -> list[tuple[str, str]]:
        hints = [
            {"action_id": str(place), "action_type": kind, "action_version": "1.0", "payload": payload}
            for place, (kind, payload) in enumerate(actions)
        ]
        req = b.req(rid)
        req.session_id, req.customized_info, req.origin_input_ids = "agent", None, [1] * 4 * PAGE
        req.kv_hints = {"protocol_version": "1.0", "message_id": "", "actions": hints} if hints else None
        b.linker.before_lookup(req, list, b.vote)
        b.linker.lookup(rid, b.transfer(keys))
        wishes = b.linker._requests.of(rid).wishes
        if wishes is not None:
            wishes.result(10)
        b.linker.admitted(req)
        return [(one["kind"], one["outcome"]) for one in req.customized_info["kvtier"][0].get("hints", ())]

    assert asked("first") == []
    keep = {"directives": [{"priority": 80, "duration": 60}]}
    assert asked("second", ("kv.prefetch", {"session_id": "agent"}), ("kv.retain", keep)) == [
        ("kv.prefetch", "accepted"),
        ("kv.retain", "accepted"),
    ]
    assert asked("third", ("kv.release", {"session_id": "agent"})) == [("kv.release", "accepted")]
    assert asked("fourth", ("kv.release", {"session_id": "another"})) == [("kv.release", "rejected")]


def test_a_hint_that_is_refused_counts_once_however_often_a_request_is_looked_up(bench: Any) -> None:
    b, keys = bench(), keys_of(4)
    req = b.req("r", hints={"kv_hints": "no envelope"})
    for length in (2, 3, 4):
        b.linker.before_lookup(req, list, b.vote)
        b.linker.lookup("r", b.transfer(keys[:length]))
    assert b.linker._pages.cache.stats()["requests"]["hints"] == {"rejected": 1}


def test_ranks_have_the_same_requests_though_one_fails_to_answer_a_sender(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is sent back and admitted again is voted on anew: a rank that kept it would not vote, and the
    others would wait for it for ever."""
    b, keys = bench(), keys_of(2)
    b.lookup("r", keys)
    b.linker.awaited("r")
    monkeypatch.setattr(b.linker._requests, "admit", lambda *_: 1 / 0)
    b.linker.admitted(b.req("r"))
    assert b.linker._requests.of("r") is None
