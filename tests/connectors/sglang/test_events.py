"""The tiers' changes as SGLang's own KV events, without an engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from kvtier.identity.keys import SHARED, BlockKey, Scope, make_keys, scope_of
from tests.connectors.sglang.support.linker_bench import PAGE

pytestmark = pytest.mark.usefixtures("on_cpu")


def pages_of(tokens: list[int]) -> list[str]:
    """The hashes of a prompt's whole pages, as SGLang's tree has them."""
    from kvtier.connectors.sglang.events import page_hash

    out, before = list[str](), b""
    for start in range(0, len(tokens) // PAGE * PAGE, PAGE):
        before = page_hash(before, tokens[start : start + PAGE])
        out.append(before.hex())
    return out


def request(tokens: list[int], output: tuple[int, ...] = (), **asked: Any) -> Any:
    params = SimpleNamespace(custom_params={"kvtier": asked} if asked else None)
    return SimpleNamespace(
        rid="r", cache_salt=None, extra_key=None, sampling_params=params, origin_input_ids=tokens,
        output_ids=list(output), session_id=None,
    )  # fmt: skip


TOKENS = list(range(7, 7 + 6 * PAGE + 3))


def chain_of_pages(pages: list[str], scope: Scope = SHARED) -> list[BlockKey]:
    return make_keys(scope, [bytes.fromhex(page) for page in pages])


def trees_own(first: int, stop: int, medium: Any) -> Any:
    """The event that SGLang's recorder makes of these pages."""
    from sglang.srt.mem_cache.events import KVCacheEventRecorder

    class Key:
        extra_key = cache_salt = None
        is_bigram = False
        token_ids = TOKENS[first * PAGE : stop * PAGE]

        def __len__(self) -> int:
            return len(self.token_ids)

    root = SimpleNamespace(parent=None, hash_value=[])
    pages = pages_of(TOKENS)
    before = root if not first else SimpleNamespace(parent=root, hash_value=pages[:first])
    recorder = KVCacheEventRecorder(enabled=True, page_size=PAGE)
    recorder.record_store(SimpleNamespace(key=Key(), hash_value=pages[first:stop], parent=before), medium)
    (event,) = recorder.take()
    return event


def test_an_event_is_the_trees_own_but_for_the_medium() -> None:
    import msgspec
    from sglang.srt.disaggregation.kv_events import BlockRemoved, KVEventBatch

    from kvtier.connectors.sglang.events import MEDIA, PageEvents

    events, chain = PageEvents(PAGE, tiers=("g2", "g3", "g4")), chain_of_pages(pages_of(TOKENS))
    events.remember(request(TOKENS), chain[:2], 0)
    events.remember(request(TOKENS[: 5 * PAGE], (*TOKENS[5 * PAGE :], 4)), chain, 2)
    for tier, medium in MEDIA.items():
        for first, stop in ((0, 2), (2, 6), (3, 4)):
            events.events.of(tier)(chain[first:stop], True)
            (ours,) = events.take()
            assert ours == trees_own(first, stop, medium)
    events.events.of("g3")(chain[1:3], False)
    (gone,) = events.take()
    assert isinstance(gone, BlockRemoved) and gone.block_hashes == trees_own(1, 3, MEDIA["g3"]).block_hashes
    batch = KVEventBatch(ts=1.0, events=[ours, gone])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch).events == [ours, gone]


def test_pages_that_lie_beyond_the_prompt_are_told_of() -> None:
    """An output that is offloaded bit by bit."""
    from kvtier.connectors.sglang.events import MEDIA, PageEvents

    events, chain = PageEvents(PAGE), chain_of_pages(pages_of(TOKENS))
    req = request(TOKENS[: 2 * PAGE + 1], tuple(TOKENS[2 * PAGE + 1 :]))
    for start, stop in ((0, 2), (2, 4), (4, 6)):
        events.remember(req, chain[:stop], start)
        events.events.of("g2")(chain[start:stop], True)
        assert list(events.take()) == [trees_own(start, stop, MEDIA["g2"])]


def test_blocks_of_other_names_in_the_tree_or_of_other_tokens_are_not_told_of() -> None:
    from kvtier.connectors.sglang.events import PageEvents

    pages = pages_of(TOKENS)
    for tokens, scope in ((TOKENS, scope_of("tenant")), ([9, *TOKENS[1:]], SHARED)):
        events, chain = PageEvents(PAGE), chain_of_pages(pages, scope)
        events.remember(request(tokens), chain, 0)
        events.events.of("g2")(chain, True)
        assert list(events.take()) == []
    events.events.of("g2")(chain_of_pages(pages, scope_of(None, b"", "private")), False)
    assert list(events.take()) == [], "an isolated block has the hash of the shared one"


def events_in_time(linker: Any, count: int) -> list[Any]:
    """The linker's events, once there are so many."""
    out: list[Any] = []
    for _ in range(1000):
        out += linker.kv_events()
        if len(out) >= count:
            break
        time.sleep(0.02)
    return out


def test_a_linker_tells_of_what_it_stores_and_of_what_an_earlier_one_did(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtier.connectors.sglang import linker as module
    from kvtier.connectors.sglang.events import MEDIA

    monkeypatch.setattr(module, "publishes", lambda _: True)
    pages = pages_of(TOKENS)
    b = bench()
    b.linker.offloads_for(request(TOKENS))
    b.linker.before_offload([])
    assert b.linker.offload(b.transfer(pages, [1, 2, 3, 4, 5, 6]))
    b.settle()
    b.linker._pages.cache.flush()
    assert events_in_time(b.linker, 2) == [trees_own(0, 6, MEDIA["g2"]), trees_own(0, 6, MEDIA["g3"])]
    shallow = list(range(900, 900 + 2 * PAGE))
    b.linker.offloads_for(request(shallow, ceiling="g2"))
    b.linker.before_offload([])
    assert b.linker.offload(b.transfer(pages_of(shallow), [7, 8]))
    b.settle()
    (announcer,) = b.linker._announcers.values()
    b.linker._pages.cache.submit(announcer.write()).result(20)  # a linker that closes waits a second for it
    b.linker.close()
    again = bench()
    assert events_in_time(again.linker, 1) == [trees_own(0, 6, MEDIA["g3"])], "before any request for it"
    again.linker.before_lookup(request(TOKENS), list, again.vote)
    again.linker.lookup("r", again.transfer(pages))
    assert events_in_time(again.linker, 2)[-1] == trees_own(0, 6, MEDIA["g2"]), "promoted"
    again.linker._rotate()
    assert [type(event).__name__ for event in again.linker.kv_events()] == ["AllBlocksCleared"]
