"""The tiers' changes as SGLang's own KV events, without an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch")

from kvtier.identity.keys import SHARED, BlockKey, Scope, make_keys, scope_of
from tests.connectors.sglang.support.linker_bench import PAGE

pytestmark = pytest.mark.usefixtures("on_cpu")


ADAPTER, PUBLIC = "0123456789abcdef" * 2, "tuned"


class Labels(NamedTuple):
    """As a request has them: an adapter's id ends the extra key."""

    salt: str | None = None
    extra_key: str | None = None
    lora_id: str | None = None


NONE = Labels()
LABELS = {
    "none": NONE,
    "salt": Labels("tenant"),
    "extra key": Labels(None, "kind"),
    "both": Labels("tenant", "kind"),
    "adapter": Labels(None, ADAPTER, ADAPTER),
    "all": Labels("tenant", "kind" + ADAPTER, ADAPTER),
}


def pages_of(tokens: list[int], labels: Labels = NONE) -> list[str]:
    """The hashes of a prompt's whole pages, as SGLang's tree has them."""
    from sglang.srt.mem_cache.utils import storage_namespace_seed

    from kvtier.connectors.sglang.page_names import page_hashes

    seed = storage_namespace_seed(labels.extra_key, labels.salt)
    return [name.hex() for name in page_hashes(bytes.fromhex(seed or ""), tokens, PAGE)]


def request(tokens: list[int], output: tuple[int, ...] = (), labels: Labels = NONE, **asked: Any) -> Any:
    params = SimpleNamespace(custom_params={"kvtier": asked} if asked else None)
    return SimpleNamespace(
        rid="r", cache_salt=labels.salt, extra_key=labels.extra_key, lora_id=labels.lora_id, sampling_params=params,
        origin_input_ids=tokens, output_ids=list(output), session_id=None,
    )  # fmt: skip


TOKENS = list(range(7, 7 + 6 * PAGE + 3))


@pytest.fixture
def public_adapter(monkeypatch: pytest.MonkeyPatch, on_cpu: None) -> None:
    from kvtier.connectors.sglang import adapters

    monkeypatch.setitem(adapters._loaded, ADAPTER, "files")
    monkeypatch.setitem(adapters._public, ADAPTER, PUBLIC)


def chain_of_pages(pages: list[str], scope: Scope = SHARED) -> list[BlockKey]:
    return make_keys(scope, [bytes.fromhex(page) for page in pages])


def trees_own(
    first: int, stop: int, medium: Any, labels: Labels = NONE, *, gone: bool = False, dynamo: bool = False
) -> Any:
    """The event that SGLang's recorder makes of these pages."""
    from sglang.srt.mem_cache.events import KVCacheEventRecorder, KvEventLoraNames

    class Key:
        extra_key, cache_salt, is_bigram = labels.extra_key, labels.salt, False

        def __init__(self, first: int, stop: int) -> None:
            self.token_ids = TOKENS[first * PAGE : stop * PAGE]

        def __len__(self) -> int:
            return len(self.token_ids)

        def __iter__(self) -> Iterator[int]:
            return iter(self.token_ids)

    def node(first: int, stop: int, parent: Any) -> Any:
        hashes = pages_of(TOKENS, labels)[first:stop]
        return SimpleNamespace(key=Key(first, stop), hash_value=hashes, event_hash_value=None, parent=parent)

    names = KvEventLoraNames()
    names.register(request(TOKENS, labels=labels), PUBLIC)
    recorder = KVCacheEventRecorder(enabled=True, page_size=PAGE, dynamo_format=dynamo, lora_names=names)
    before = root = node(0, 0, None)
    if first:
        before = node(0, first, root)
        recorder.record_store(before)
        recorder.take()
    (recorder.record_remove if gone else recorder.record_store)(node(first, stop, before), medium)
    (event,) = recorder.take()
    return event


AMBIGUOUS = ("extra key", "both")  # by the default format
DISTINCT = [(name, dynamo) for name in LABELS for dynamo in (False, True) if dynamo or name not in AMBIGUOUS]


@pytest.mark.parametrize(("name", "dynamo"), DISTINCT)
@pytest.mark.usefixtures("public_adapter")
def test_events_of_labelled_requests_are_the_trees_own_but_for_the_medium(name: str, dynamo: bool) -> None:
    from kvtier.connectors.sglang.events import MEDIA, PageEvents

    labels = LABELS[name]
    events = PageEvents(PAGE, tiers=("g2", "g3", "g4"), dynamo=dynamo)
    chain = chain_of_pages(pages_of(TOKENS, labels), SHARED if labels == NONE else scope_of("one", b"two"))
    events.remember(request(TOKENS, labels=labels), chain[:2], 0)
    events.remember(request(TOKENS[: 5 * PAGE], (*TOKENS[5 * PAGE :], 4), labels), chain, 2)
    for tier, medium in MEDIA.items():
        for first, stop in ((0, 2), (2, 6), (3, 4)):
            events.events.of(tier)(chain[first:stop], True)
            assert list(events.take()) == [trees_own(first, stop, medium, labels, dynamo=dynamo)]
        events.events.of(tier)(chain[1:3], False)
        assert list(events.take()) == [trees_own(1, 3, medium, labels, gone=True, dynamo=dynamo)]


@pytest.mark.parametrize("name", [*AMBIGUOUS, "adapter"])
def test_blocks_that_share_names_with_others_are_not_told_of(name: str) -> None:
    """Of extra keys in the default format, and of an adapter that no event could name."""
    from kvtier.connectors.sglang.events import PageEvents

    events, labels = PageEvents(PAGE), LABELS[name]
    chain = chain_of_pages(pages_of(TOKENS, labels), scope_of("one"))
    events.remember(request(TOKENS, labels=labels), chain, 0)
    events.events.of("g2")(chain, True)
    events.events.of("g2")(chain, False)
    assert list(events.take()) == []


def test_a_name_that_is_forgotten_is_taken_back_first() -> None:
    """Its removal could not be told of any more."""
    from sglang.srt.disaggregation.kv_events import BlockStored

    from kvtier.connectors.sglang.events import PageEvents

    def stored(tenant: str) -> list[BlockKey]:
        chain = chain_of_pages(pages_of(TOKENS, Labels(tenant)), scope_of(tenant))
        events.remember(request(TOKENS, labels=Labels(tenant)), chain, 0)
        for tier in ("g2", "g3"):
            events.events.of(tier)(chain, True)
        return chain

    def listen() -> int:
        """A router's book; a block that is taken back was announced."""
        for event in events.take():
            for name in event.block_hashes:
                if isinstance(event, BlockStored):
                    book.add((event.medium, name))
                else:
                    book.remove((event.medium, name))
        return len(book)

    events, book, chains = PageEvents(PAGE, known_max=24), set[tuple[str, int]](), list[list[BlockKey]]()
    for number in range(12):
        chains.append(stored(f"tenant {number}"))
        assert 2 * min(6 * (number + 1), 12) <= listen() <= 2 * 24
    for chain in chains:
        for tier in ("g2", "g3"):
            events.events.of(tier)(chain, False)
    assert listen() == 0


def test_of_what_g3_kept_the_newest_prompts_stay_announced() -> None:
    """Where there are more of them than names are remembered: they come first."""
    from kvtier.connectors.contents import Passage
    from kvtier.connectors.sglang.events import PageEvents

    events, told = PageEvents(PAGE, known_max=24), list[Any]()
    for number in range(12):
        salt = f"tenant {number}"
        chain = chain_of_pages(pages_of(TOKENS, Labels(salt)), scope_of(salt))
        events._told.append(Passage(chain, None, TOKENS[: 6 * PAGE], [None] * 6, salt))
        events.events.of("g3")(chain, True)
        told += events.take()
    assert [type(event).__name__ for event in told] == ["BlockStored"] * len(told)
    assert [event.cache_salt for event in told] == [f"tenant {number}" for number in range(len(told))]
    assert 2 <= len(told) <= 4


@pytest.mark.parametrize("name", ["salt", "adapter", "all"])
@pytest.mark.usefixtures("public_adapter")
def test_a_linker_tells_of_labelled_requests_and_of_an_earlier_linkers(
    name: str, bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtier.connectors.sglang import linker as module
    from kvtier.connectors.sglang.events import MEDIA

    monkeypatch.setattr(module, "publishes", lambda _: True)
    labels, b = LABELS[name], bench()
    pages = pages_of(TOKENS, labels)
    for first, stop in ((0, 2), (2, 6)):
        b.linker.offloads_for(request(TOKENS, labels=labels))
        b.linker.before_offload(pages[:first])
        assert b.linker.offload(b.transfer(pages[first:stop], list(range(first, stop))))
    b.settle()
    b.linker._pages.cache.flush()
    told = events_in_time(b.linker, 4)
    assert {event.medium for event in told} == set(MEDIA.values()) - {MEDIA["g4"]}
    (announcer,) = b.linker._announcers.values()
    b.linker._pages.cache.submit(announcer.write()).result(20)
    b.linker.close()
    again = bench()
    assert events_in_time(again.linker, 1) == [trees_own(0, 6, MEDIA["g3"], labels)], "before any request for it"
    again.linker._pages.cache.purge(labels.salt)
    names = [name for event in events_in_time(again.linker, 1) for name in event.block_hashes]
    assert set(names) == set(trees_own(0, 6, MEDIA["g3"], labels, gone=True).block_hashes)


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


def test_names_do_not_depend_on_how_a_request_has_its_tokens() -> None:
    """SGLang has arrays of 64 bits; a token that is not of 32 has no place in a chain."""
    from array import array

    from kvtier.connectors.sglang.page_names import page_hashes

    assert page_hashes(b"", array("q", TOKENS), PAGE) == page_hashes(b"", TOKENS, PAGE)
    assert page_hashes(b"", array("q"), PAGE) == []
    for wrong in (-1, 1 << 32):
        for tokens in ([wrong] * PAGE, array("q", [wrong] * PAGE)):
            with pytest.raises(OverflowError):
                page_hashes(b"", tokens, PAGE)


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


@pytest.mark.parametrize("name", ["none", "salt", "adapter"])
@pytest.mark.usefixtures("public_adapter")
def test_a_prompt_is_told_of_up_to_its_first_image(name: str) -> None:
    """SGLang puts numbers of 62 bits in the place of an image's tokens. A batch of events with one of them is none that
    a router of 32 bits reads, and none was told of a salted prompt at all: an error in the log for each request."""
    from kvtier.connectors.sglang.events import MEDIA, PageEvents

    labels, image = LABELS[name], 3 * PAGE + 5
    tokens = [*TOKENS[:image], *[1_000_000 + (1 << 61)] * PAGE, *TOKENS[image + PAGE :]]
    scope = SHARED if labels == NONE else scope_of(labels.salt, b"adapter" if labels.lora_id else b"")
    heads = pages_of(TOKENS, labels)[:3]
    chain = chain_of_pages([*heads, *(f"{page:064x}" for page in range(3))], scope)
    events = PageEvents(PAGE)
    for start in (0, 4):
        events.remember(request(tokens, labels=labels), chain, start, lasting=len(chain))
        events.events.of("g2")(chain[start:], True)
        told = list(events.take())
        assert told == ([trees_own(0, 3, MEDIA["g2"], labels)] if start == 0 else [])
    events.remember(request([1_000_000 + (1 << 61)] * 4 * PAGE, labels=labels), chain[:4], 0)


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
