"""Dynamo's own indexer hears what SGLang's linker publishes, over SGLang's own publisher."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from kvtier.identity.keys import SHARED, scope_of
from tests.connectors.sglang.support.linker_bench import PAGE
from tests.connectors.sglang.test_events import (
    LABELS,
    NONE,
    PUBLIC,
    TOKENS,
    Labels,
    chain_of_pages,
    pages_of,
    public_adapter,
    request,
    trees_own,
)
from tests.connectors.vllm.support.indexer import HOW, PYTHON, Indexer, free_port

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("on_cpu"),
    pytest.mark.skipif(not PYTHON, reason=HOW),
]

__all__ = ["public_adapter"]
Publish = Callable[[list[Any]], None]


@pytest.fixture
def published(tmp_path: Path, on_cpu: None) -> Iterator[tuple[Publish, Indexer]]:
    """Publishes events as an engine does, and an indexer that hears them."""
    from sglang.srt.disaggregation.kv_events import KVEventBatch, ZmqEventPublisher

    events, replay = free_port(), free_port()
    publisher = ZmqEventPublisher(0, f"tcp://*:{events}", f"tcp://*:{replay}")
    indexer = Indexer(f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}", PAGE, tmp_path / "indexer.log")
    yield lambda made: publisher.publish(KVEventBatch(ts=time.time(), events=made)), indexer
    indexer.close()
    publisher.shutdown()


def known_in_time(
    publish: Publish, indexer: Indexer, take: Callable[[], Any], tokens: list[int], right: list[int], **asked: Any
) -> None:
    """The indexer knows so many leading pages of the prompt, on from tier to tier, once it has heard the events."""
    deadline = time.monotonic() + 30
    while True:
        publish(list(take()))  # a batch that was lost is missed with the next one
        known = indexer.known(tokens, **asked)
        if known == [count * PAGE for count in right]:
            return
        assert time.monotonic() < deadline, known
        time.sleep(0.1)


def asked_with(labels: Labels) -> dict[str, str]:
    """How a router is asked about a prompt with these labels."""
    asked = {} if labels.salt is None else {"cache_salt": labels.salt}
    return asked if labels.lora_id is None else {**asked, "lora_name": PUBLIC}


def stored(b: Any, tokens: list[int], labels: Labels = NONE, **asked: Any) -> None:
    b.linker.offloads_for(request(tokens, labels=labels, **asked))
    b.linker.before_offload([])
    assert b.linker.offload(b.transfer(pages_of(tokens, labels), list(range(1, len(tokens) // PAGE + 1))))
    b.settle()
    b.linker._pages.cache.flush()


def test_the_indexer_counts_every_tier_after_stores_evictions_and_restarts(
    bench: Callable[..., Any], published: tuple[Publish, Indexer], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtier.connectors.sglang import linker as module

    monkeypatch.setattr(module, "publishes", lambda _: True)
    publish, indexer = published
    one, shallow, salted = (list(range(begin, begin + 6 * PAGE + 3)) for begin in (7, 3000, 6000))
    b = bench()
    stored(b, one)
    known_in_time(publish, indexer, b.linker.kv_events, one, [0, 6, 6])
    stored(b, shallow, ceiling="g2")
    known_in_time(publish, indexer, b.linker.kv_events, shallow, [0, 6, 6])  # the last counts on from where G2 ends
    stored(b, salted, Labels("tenant"))
    known_in_time(publish, indexer, b.linker.kv_events, salted, [0, 6, 6], cache_salt="tenant")
    assert indexer.known(salted) == [0, 0, 0]
    b.linker._pages.cache.evict("g2")
    known_in_time(publish, indexer, b.linker.kv_events, one, [0, 0, 6])
    known_in_time(publish, indexer, b.linker.kv_events, shallow, [0, 0, 0])
    (announcer,) = b.linker._announcers.values()
    b.linker._pages.cache.submit(announcer.write()).result(20)
    b.linker._rotate()  # new weights
    known_in_time(publish, indexer, b.linker.kv_events, one, [0, 0, 0])
    b.linker.close()
    again = bench()  # announces what the directory keeps
    known_in_time(publish, indexer, again.linker.kv_events, one, [0, 0, 6])
    known_in_time(publish, indexer, again.linker.kv_events, salted, [0, 0, 6], cache_salt="tenant")
    again.linker._pages.cache.purge()
    known_in_time(publish, indexer, again.linker.kv_events, one, [0, 0, 0])
    known_in_time(publish, indexer, again.linker.kv_events, salted, [0, 0, 6], cache_salt="tenant")
    again.linker._pages.cache.purge("tenant")
    known_in_time(publish, indexer, again.linker.kv_events, salted, [0, 0, 0], cache_salt="tenant")


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.usefixtures("public_adapter")
def test_the_indexer_goes_on_from_the_trees_own_blocks(dynamo: bool, published: tuple[Publish, Indexer]) -> None:
    """Of every kind of request: its names in G2 and G3 are those that the tree gives to the same pages in G1."""
    from sglang.srt.disaggregation.kv_events import AllBlocksCleared, StorageMedium

    from kvtier.connectors.sglang.events import PageEvents

    publish, indexer = published
    for name in ("none", "salt", "adapter", "all"):
        labels = LABELS[name]
        asked, events = asked_with(labels), PageEvents(PAGE, dynamo=dynamo)
        chain = chain_of_pages(pages_of(TOKENS, labels), SHARED if labels == NONE else scope_of("one", b"two"))
        events.remember(request(TOKENS, labels=labels), chain, 0)
        publish([trees_own(0, 2, StorageMedium.GPU, labels, dynamo=dynamo)])
        known_in_time(publish, indexer, events.take, TOKENS, [2, 2, 2], **asked)
        events.events.of("g2")(chain[2:4], True)
        events.events.of("g3")(chain[3:], True)
        known_in_time(publish, indexer, events.take, TOKENS, [2, 4, 6], **asked)
        events.events.of("g2")(chain[3:4], False)
        known_in_time(publish, indexer, events.take, TOKENS, [2, 3, 6], **asked)
        others = [asked_with(other) for other in (NONE, LABELS["salt"], LABELS["adapter"], LABELS["all"])]
        assert all(indexer.known(TOKENS, **other) == [0, 0, 0] for other in others if other != asked)
        publish([AllBlocksCleared()])
        known_in_time(publish, indexer, events.take, TOKENS, [0, 0, 0], **asked)
