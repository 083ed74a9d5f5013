"""Windows beside full attention, without an engine: boundaries are stored and come back whole, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.connectors.sglang.support.linker_bench import PAGE, WINDOW, Kind, keys_of, windows
from tests.support.waiting import eventually

PARTS, PAGES = 2, WINDOW // PAGE
KINDS = (Kind.FULL, Kind.SWA)
HEAD = list(range(1, 9))  # pages of the full pool


@pytest.fixture
def windowed(bench: Any) -> Callable[..., Any]:
    """Makes a linker over SGLang's pool of windows: three layers of them, in two parts."""

    def make(**changed: Any) -> Any:
        made = bench(device=windows("SSFSF"), kinds=KINDS, **changed)
        made.window_of = {page: 20 - page for page in HEAD}
        return made

    return make


@pytest.fixture(params=[False, True], ids=["here", "pumped"])
def either(request: pytest.FixtureRequest, windowed: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Copies are made by this thread, or by those of the parts, as on a GPU."""
    from kvtier.connectors.sglang.linker import KVTierLinker
    from kvtier.connectors.sglang.pool import KVPools

    if request.param:
        monkeypatch.setattr(KVPools, "on_gpu", True)
        monkeypatch.setattr(KVTierLinker, "_ordering_stream", lambda self: None)
    made = windowed()
    assert eventually(lambda: made.linker._pages.ready)
    return made


def end(pages: int, *, begin: int = 0, lasting: bool = True) -> Any:
    from kvtier.connectors.sglang.hooks import Checkpoint

    return Checkpoint(begin * PAGE, pages * PAGE, lasting)


def settled(b: Any) -> list[bool]:
    answers: list[bool] = []
    assert eventually(lambda: answers.extend(b.settle()) or answers)
    return answers


def found(b: Any, rid: str, keys: list[str], head: list[str] | None = None, **req: Any) -> list[int]:
    """What the request is given once nothing is on its way up for it any more."""

    def answered() -> bool:
        answers[:] = [b.lengths(rid, keys, head, **req)]
        return not b.linker._requests.of(rid).waits

    answers: list[list[int]] = []
    assert eventually(answered)
    return answers[0]


def store(b: Any, keys: list[str], count: int = 8, **given: Any) -> list[bool]:
    """The first pages of a prompt enter the tree, up to there."""
    given = {"checkpoint": end(count), "path": HEAD[:count], **given}
    assert b.offload(keys[:count], HEAD[:count], **given)
    return settled(b)


def load(b: Any, rid: str, keys: list[str], pages: list[int], beside: list[int]) -> bool:
    transfers = [*b.transfer(keys, pages), b.windows(keys[-len(beside) :], beside)]
    return bool(b.linker.load(rid, transfers))


def test_both_pools_come_back_as_they_were(either: Any) -> None:
    b, keys = either, keys_of(8)
    assert store(b, keys) == [True]
    assert b.linker.stats()["engine"]["events"] == {"blocks_stored": 8 + PARTS * PAGES}
    full = [b.bytes_of(page) for page in HEAD]
    beside = [b.bytes_of(b.window_of[page], window=True) for page in HEAD[-PAGES:]]
    assert found(b, "r", keys) == [8], "no boundary is before it"
    assert load(b, "r", keys, list(range(21, 29)), [1, 3, 5, 7])
    index = b.linker.start_layer_wise_loading()
    counter = b.linker.layer_done_counter
    assert counter.num_layers == 5
    counter.set_consumer(index)
    for layer in range(5):
        counter.wait_until(layer)
    assert [b.bytes_of(page) for page in range(21, 29)] == full, "a fence without streams is the copy"
    assert [b.bytes_of(page, window=True) for page in (1, 3, 5, 7)] == beside
    assert b.linker.finish_layer_wise_loading(index)
    assert b.pinned() == 0
    b.linker._pages.cache.check()


def test_only_what_the_device_lacks_of_a_window_is_loaded(either: Any) -> None:
    b, keys = either, keys_of(8)
    store(b, keys)
    beside = [b.bytes_of(b.window_of[page], window=True) for page in HEAD[-2:]]
    untouched = b.bytes_of(9, window=True)
    assert found(b, "r", keys[6:], keys[:6]) == [2]
    assert not load(b, "r", keys[6:], [21, 22], [7]), "a page of the window is not asked for"
    assert not load(b, "r", keys[6:], [21, 22], [5, 7, 9]), "one of them is the device's"
    assert load(b, "r", keys[6:], [21, 22], [5, 7]) and b.run()
    assert [b.bytes_of(page, window=True) for page in (5, 7)] == beside
    assert b.bytes_of(9, window=True) == untouched and b.pinned() == 0


def test_a_boundary_is_kept_at_the_ends_of_prompts_and_answers_alone(windowed: Any) -> None:
    b, keys = windowed(), keys_of(8)
    path = HEAD[:4]
    assert b.offload(keys[:4], path, checkpoint=end(8), path=path) and b.settle() == [True]
    assert b.offload(keys[4:], HEAD[4:], keys[:4], checkpoint=end(8), path=HEAD) and b.settle() == [True]
    assert found(b, "r", keys) == [8] and found(b, "s", keys[:6]) == []
    other = keys_of(8, seed=1)
    assert store(b, other, checkpoint=end(8, lasting=False)) == [True]
    assert found(b, "t", other) == [], "in the middle of a prompt, and not far enough from the last one"


@pytest.mark.parametrize("what", ["freed", "unaligned", "short"])
def test_a_window_that_the_tree_has_not_whole_is_not_stored(windowed: Any, what: str) -> None:
    b, keys = windowed(), keys_of(8)
    path = HEAD[1:] if what == "short" else HEAD
    if what == "freed":
        del b.window_of[HEAD[-PAGES]]
    if what == "unaligned":
        b.window_shift = 1
    assert store(b, keys, path=path) == [True]
    assert found(b, "r", keys) == []
    assert b.linker.stats()["engine"]["events"] == {"blocks_stored": 8}


def test_pages_behind_the_window_may_be_gone(windowed: Any) -> None:
    b, keys = windowed(), keys_of(8)
    for page in HEAD[:-PAGES]:
        del b.window_of[page]
    store(b, keys)
    assert found(b, "r", keys) == [8]


def test_a_prompt_shorter_than_the_window(windowed: Any) -> None:
    b, keys = windowed(), keys_of(2)
    store(b, keys, 2)
    beside = [b.bytes_of(b.window_of[page], window=True) for page in HEAD[:2]]
    assert found(b, "r", keys) == [2]
    assert load(b, "r", keys, [21, 22], [7, 9]) and b.run()
    assert [b.bytes_of(page, window=True) for page in (7, 9)] == beside


def test_a_boundary_that_a_part_could_not_copy_is_not_published(windowed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    b, keys = windowed(), keys_of(8)
    last = b.linker._pages._engine._engines[-1]
    with monkeypatch.context() as patch:
        patch.setattr(last, "store", _fails)
        assert store(b, keys) == [False]
    assert found(b, "r", keys) == [], "the chain alone is of no use"
    assert b.linker.stats()["engine"]["events"]["blocks_stored"] == 8, "nor is a part of what a boundary needs"
    b.linker._pages.cache.check()
    assert store(b, keys) == [True], "the tree asks again"
    assert found(b, "s", keys) == [8] and b.pinned() == 0


def test_a_load_that_a_part_could_not_make_fails_as_a_whole(windowed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    b, keys = windowed(), keys_of(8)
    store(b, keys)
    assert found(b, "r", keys) == [8] and load(b, "r", keys, list(range(21, 29)), [1, 3, 5, 7])
    with monkeypatch.context() as patch:
        patch.setattr(b.linker._pages._engine._engines[-1], "load", _fails)
        assert not b.run()
    assert b.pinned() == 0 and b.linker.stats()["engine"]["events"]["load_failures"] == 1


def _fails(*_: Any) -> int:
    raise RuntimeError("the device is gone")


@pytest.mark.parametrize("depth", [7, 8])
def test_a_boundary_is_where_the_tree_takes_the_prompt_to_and_nowhere_else(windowed: Any, depth: int) -> None:
    """Only what lies before the end of the tokens that enter it is locked until it is copied."""
    b, keys = windowed(), keys_of(8)
    assert store(b, keys, checkpoint=end(depth)) == [True]
    assert found(b, "r", keys) == ([8] if depth == 8 else [])


def test_a_boundary_that_has_lost_a_block_is_none(windowed: Any) -> None:
    b, keys = windowed(), keys_of(8)
    store(b, keys)
    assert found(b, "r", keys) == [8]
    host = b.linker._pages.cache.manager.host
    lost = b.linker._beside.keys(b.chain(keys), 8)[-1]
    assert b.linker._pages.cache.flush(20).pending == 0
    assert sum(host.drop_where(lambda number: host.index.table.keys[number] == lost)) == 1
    assert not load(b, "r", keys, list(range(21, 29)), [1, 3, 5, 7]), "found before, and gone since"
    assert b.lengths("s", keys) == [], "it waits for what it lacks"
    b.linker.forget("r")
    assert found(b, "s", keys) == [8], "which comes back from the disk"
    b.linker.forget("s")
    assert b.pinned() == 0


def test_a_freed_page_of_one_token_is_none(windowed: Any) -> None:
    """Slot 0 is what SGLang's table has for it; a page of one token has no other slot to tell by."""
    import torch

    from kvtier.connectors.sglang.windows import Windows
    from kvtier.identity.groups import Group
    from kvtier.identity.groups import Kind as GroupKind
    from kvtier.retention.ranges import uniform
    from kvtier.retention.terms import Terms

    chain, group = windowed().chain(keys_of(8)), Group(GroupKind.WINDOW, 1, 4)
    for freed, whole in ((4, True), (5, False), (7, False)):
        table = torch.arange(1, 9)
        table[freed] = 0
        rule = Windows(group, 1, lambda slots, table=table: table[slots])
        at_end = end(8)._replace(end=8)
        kept = rule.boundary(chain, uniform(Terms("some")), at_end, lambda: torch.arange(8), ())
        assert (kept is not None) == whole, freed


def test_a_chain_without_room_is_stored_without_its_boundary(windowed: Any) -> None:
    block = windowed().pool.block_bytes
    b, path = windowed(g2=f"{8 * block}B"), [*HEAD, *range(21, 29)]
    b.window_of = {page: number for number, page in enumerate(path, 1)}
    slots = b.linker._pages.cache.manager.host.arena.slots
    assert slots < len(path)
    assert b.offload(keys_of(16), path, checkpoint=end(16), path=path)
    assert settled(b) == [False]
    events = b.linker.stats()["engine"]["events"]
    assert events["stores_without_room"] == len(path) - events["blocks_stored"], "of the chain alone"


def test_without_room_for_a_whole_boundary_none_of_it_is_stored(windowed: Any) -> None:
    block = windowed().pool.block_bytes
    b, keys = windowed(g2=f"{12 * block}B"), keys_of(8)
    assert b.linker._pages.cache.manager.host.arena.slots < 8 + PARTS * PAGES
    assert store(b, keys) == [False], "the tree asks again"
    assert found(b, "r", keys) == []
    assert b.linker.stats()["engine"]["events"]["blocks_stored"] == 8
    b.linker._pages.cache.check()


def test_bytes_of_other_blocks_are_not_stored_behind_a_part_with_fewer_layers(windowed: Any) -> None:
    b, keys = windowed(), keys_of(8)
    used = b.pool.beside[1].shape.block_bytes
    assert used < b.pool.block_bytes
    index, arena = b.linker._pages.cache.manager.host.index, b.linker._pages.cache.manager.host.arena
    for number in range(arena.slots):
        (piece,) = arena.pieces(number)
        piece[:] = b"\xaa" * len(piece)
    store(b, keys)
    names = b.linker._beside.keys(b.chain(keys), 8)
    for place, name in enumerate(names):
        rest = bytes(index.get(name).pieces[0][used : b.pool.block_bytes])
        assert (rest == bytes(len(rest))) == (place >= PAGES)


def test_a_prompt_leaves_what_is_known_where_no_boundary_is(windowed: Any) -> None:
    """The tree is told, and keeps a window there."""
    b, keys = windowed(), keys_of(8)
    store(b, keys)
    other = [*keys[:6], *keys_of(4, seed=2)]
    assert found(b, "r", other) == [] and b.linker.known_of("r") == 6
    assert b.linker.known_of("nobody") == 0
    assert found(b, "s", other, load=False) == [] and b.linker.known_of("s") == 0


def test_a_request_in_the_queue_looks_for_its_boundary_once(windowed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of the scheduler asks again for every request that waits to be run."""
    b, keys = windowed(), keys_of(8)
    store(b, keys)
    other, looks = [*keys[:6], *keys_of(4, seed=2)], []
    assert eventually(lambda: not (b.lengths("r", other) or b.linker._requests.of("r").waits))
    rule = type(b.linker._beside)
    holds = rule.holds
    monkeypatch.setattr(rule, "holds", lambda *given: looks.append(given[-1]) or holds(*given))
    assert [b.lengths("r", other) for _ in range(5)] == [[]] * 5 and looks == []
    assert found(b, "s", keys) == [8] and set(looks) == {8}
    b.linker._pages.cache.evict("g2")
    assert b.lengths("s", keys) == [], "what it has found is looked for again"


def test_what_lies_on_disk_is_promoted_with_its_window(windowed: Any) -> None:
    b, keys = windowed(), keys_of(8)
    store(b, keys)
    cache = b.linker._pages.cache
    assert cache.flush(20).pending == 0
    assert b.until_resident("r", keys) == 1
    b.linker.forget("r")
    cache.evict("g2")
    assert b.lengths("s", keys) == [], "it waits"
    assert found(b, "s", keys) == [8]
    assert load(b, "s", keys, list(range(21, 29)), [1, 3, 5, 7]) and b.run()
    b.linker.forget("s")
    assert b.pinned() == 0


def test_boundaries_in_the_middle_of_prompts_cost_a_quarter_of_the_chain_at_most(windowed: Any) -> None:
    rule = windowed().linker._beside
    for step in (1, 3, 7, 32, 100):
        depth = blocks = 0
        while depth < 4000:
            before, depth = depth, depth + step
            blocks += sum(rule.counts(depth)) if rule.is_due(before, depth) else 0
        assert blocks <= depth / 4
        assert blocks >= depth / 4 - 2 * PARTS * PAGES if step <= 4 * PARTS * PAGES else blocks > 0


@pytest.mark.parametrize("window", [15, 16, 17, 48, 63, 64])
def test_the_pages_of_a_boundary_are_those_that_sglangs_tree_asks_for(windowed: Any, window: int) -> None:
    """SWAComponent.build_external_linker_transfer: the last `window` tokens, in whole pages."""
    from kvtier.connectors.sglang.windows import Windows
    from kvtier.identity.groups import Group
    from kvtier.identity.groups import Kind as GroupKind

    rule = Windows(Group(GroupKind.WINDOW, PAGE, window + 1), 1, lambda slots: slots)
    for depth in range(1, 12):
        asked = min(depth, -(-window // PAGE))
        assert rule.needed(depth) == range(depth - asked, depth)


def test_tiers_of_windows_announce_no_blocks(windowed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router would count on pages that no prompt can go on behind."""
    from kvtier.connectors.sglang import linker

    monkeypatch.setattr(linker, "publishes", lambda _: True)
    b = windowed()
    store(b, keys_of(8))
    assert b.linker.kv_events() == []


@pytest.mark.parametrize("salt", [None, "alice"])
def test_windows_that_wait_for_their_copy_while_their_tenant_is_purged_are_not_stored(
    windowed: Any, monkeypatch: pytest.MonkeyPatch, salt: str | None
) -> None:
    b, keys, others = windowed(), keys_of(8), keys_of(8, seed=1)
    cache = b.linker._pages.cache
    with monkeypatch.context() as patch:
        patch.setattr(b.linker._pages._engine, "poll", list)
        for name, asked in ((salt, keys), ("bob", others)):
            assert b.offload(asked, HEAD, checkpoint=end(8), path=HEAD, salt=name)
        assert not b.settle()
        cache.purge(salt)
    assert settled(b) == [True, True]
    assert found(b, "r", keys, salt=salt) == [] and b.linker.known_of("r") == 0
    assert found(b, "s", others, salt="bob") == [8], "another tenant's stay"
    cache.check()
    assert b.pinned() == 0
