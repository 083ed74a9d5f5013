"""Dynamo's own indexer hears what SGLang's linker publishes, over SGLang's own publisher."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.connectors.sglang.support.linker_bench import PAGE
from tests.connectors.sglang.test_events import pages_of, request
from tests.connectors.vllm.support.indexer import HOW, PYTHON, Indexer, free_port

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("on_cpu"),
    pytest.mark.skipif(not PYTHON, reason=HOW),
]

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


def known_in_time(publish: Publish, indexer: Indexer, linker: Any, tokens: list[int], right: list[int]) -> None:
    """The indexer knows so many leading pages of the prompt, on from tier to tier, once it has heard the linker."""
    deadline = time.monotonic() + 30
    while True:
        publish(list(linker.kv_events()))  # a batch that was lost is missed with the next one
        known = indexer.known(tokens)
        if known == [count * PAGE for count in right]:
            return
        assert time.monotonic() < deadline, known
        time.sleep(0.1)


def stored(b: Any, tokens: list[int], salt: str | None = None, **asked: Any) -> None:
    asks = request(tokens, **asked)
    asks.cache_salt = salt
    b.linker.offloads_for(asks)
    b.linker.before_offload([])
    assert b.linker.offload(b.transfer(pages_of(tokens), list(range(1, len(tokens) // PAGE + 1))))
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
    known_in_time(publish, indexer, b.linker, one, [0, 6, 6])
    stored(b, shallow, ceiling="g2")
    known_in_time(publish, indexer, b.linker, shallow, [0, 6, 6])  # the last counts on from where G2 ends
    stored(b, salted, salt="tenant")
    known_in_time(publish, indexer, b.linker, salted, [0, 0, 0])
    b.linker._pages.cache.evict("g2")
    known_in_time(publish, indexer, b.linker, one, [0, 0, 6])
    known_in_time(publish, indexer, b.linker, shallow, [0, 0, 0])
    (announcer,) = b.linker._announcers.values()
    b.linker._pages.cache.submit(announcer.write()).result(20)
    b.linker._rotate()  # new weights
    known_in_time(publish, indexer, b.linker, one, [0, 0, 0])
    b.linker.close()
    again = bench()  # announces what the directory keeps
    known_in_time(publish, indexer, again.linker, one, [0, 0, 6])
    again.linker._pages.cache.purge()
    known_in_time(publish, indexer, again.linker, one, [0, 0, 0])
