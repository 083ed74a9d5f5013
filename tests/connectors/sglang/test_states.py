"""Recurrent states beside full attention, without an engine: boundaries come back whole, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.connectors.sglang.support.linker_bench import PAGE, Kind, keys_of, states
from tests.support.waiting import eventually

KINDS = (Kind.FULL, Kind.MAMBA)
HEAD = list(range(1, 9))  # pages of the full pool
BLOCKS = 2  # of a state, at pages of 16


def end(pages: int, *, begin: int = 0, lasting: bool = True, page: int = PAGE) -> Any:
    from kvtier.connectors.sglang.hooks import Checkpoint

    return Checkpoint(begin * page, pages * page, lasting)


@pytest.fixture
def stateful(bench: Any) -> Callable[..., Any]:
    """Makes a linker over SGLang's pool of states: two layers of them beside two of full attention."""

    def make(page: int = PAGE, latent: bool = False, slots: int = 8, **changed: Any) -> Any:
        device, requests = states(page, slots, latent)
        return bench(page=page, device=device, requests=requests, kinds=KINDS, **changed)

    return make


@pytest.fixture(params=[False, True], ids=["here", "pumped"])
def either(request: pytest.FixtureRequest, stateful: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Copies are made by this thread, or by those of the parts, as on a GPU."""
    from kvtier.connectors.sglang.linker import KVTierLinker
    from kvtier.connectors.sglang.pool import KVPools

    if request.param:
        monkeypatch.setattr(KVPools, "on_gpu", True)
        monkeypatch.setattr(KVTierLinker, "_ordering_stream", lambda self: None)
    made = stateful()
    assert eventually(lambda: made.linker._pages.ready)
    return made


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


def store(b: Any, keys: list[str], count: int = 8, start: int = 0, state: int | None = 3, **given: Any) -> list[bool]:
    """Pages of a prompt enter the tree, up to there, and a node has this state at their end."""
    given = {"checkpoint": end(count, page=b.page), "path": HEAD[:count], **given}
    assert b.offload(keys[start:count], HEAD[start:count], keys[:start], state=state, **given)
    return settled(b)


def load(b: Any, rid: str, keys: list[str], pages: list[int], slot: int) -> bool:
    return bool(b.linker.load(rid, [*b.transfer(keys, pages), b.state(keys[-1], slot)]))


def test_pages_and_state_come_back_as_they_were(either: Any) -> None:
    b, keys = either, keys_of(8)
    assert store(b, keys) == [True]
    assert b.linker.stats()["engine"]["events"] == {"blocks_stored": 8 + BLOCKS}
    full, state, others = [b.bytes_of(page) for page in HEAD], b.state_of(3), [b.state_of(at) for at in (0, 1, 2, 4)]
    assert found(b, "r", keys) == [8], "no state is before it"
    assert b.state_of(5) != state and load(b, "r", keys, list(range(21, 29)), 5)
    index, counter = b.linker.start_layer_wise_loading(), b.linker.layer_done_counter
    assert counter.num_layers == 4
    counter.set_consumer(index)
    for layer in range(4):
        counter.wait_until(layer)
    assert [b.bytes_of(page) for page in range(21, 29)] == full, "a fence without streams is the copy"
    assert b.state_of(5) == state and [b.state_of(at) for at in (0, 1, 2, 4)] == others
    assert b.linker.finish_layer_wise_loading(index)
    assert b.pinned() == 0
    b.linker._pages.cache.check()


@pytest.mark.parametrize("layer", range(4))
def test_a_forward_finds_its_state_when_it_comes_to_the_layer(stateful: Any, layer: int) -> None:
    """SGLang's table of requests waits at a layer of states, and its pool at one of full attention; neither for the
    other's."""
    b, keys = stateful(), keys_of(8)
    store(b, keys)
    full, state = b.bytes_of(8), b.state_of(3)
    assert found(b, "r", keys) == [8] and load(b, "r", keys, list(range(21, 29)), 5)
    index = b.linker.start_layer_wise_loading()
    b.linker.layer_done_counter.set_consumer(index)
    if layer in (0, 2):
        b.linker.layer_done_counter.wait_until(layer)
        assert b.state_of(5) == state and b.bytes_of(28) != full
    else:
        b.linker.layer_done_counter.wait_until(layer)
        assert b.bytes_of(28) == full and b.state_of(5) != state
    assert b.linker.finish_layer_wise_loading(index)
    assert (b.state_of(5), b.bytes_of(28)) == (state, full)


def test_the_engines_layers_wait_at_the_table_of_requests(stateful: Any) -> None:
    b = stateful()
    assert b.linker._pool.states and b.requests.layer_transfer_counter is b.linker.layer_done_counter
    assert sorted(pool.value for pool in b.linker.pools) == ["kv", "mamba"]


@pytest.mark.parametrize(("page", "blocks"), [(1, 5), (16, 2), (64, 2)])
def test_states_are_cut_into_blocks_of_any_page(stateful: Any, page: int, blocks: int) -> None:
    """Of two layers, 480 bytes of a convolution and 2048 of a state each: a page of one token has 1024."""
    b, keys = stateful(page), keys_of(4)
    assert b.linker._beside.counts(1) == [blocks]
    states_before = {slot: b.state_of(slot) for slot in range(1, 9)}
    for count, slot in ((1, 2), (4, 8)):
        path = HEAD[:count]
        assert b.offload(keys[:count], path, state=slot, checkpoint=end(count, page=page), path=path)
        assert settled(b) == [True]
    assert found(b, "r", keys) == [4] and found(b, "s", keys[:3]) == [1]
    assert b.linker.load("r", [*b.transfer(keys, [5, 6, 7, 8]), b.state(keys[-1], 1)]) and b.run()
    assert b.linker.load("s", [*b.transfer(keys[:1], [9]), b.state(keys[0], 7)]) and b.run()
    expected = {**states_before, 1: states_before[8], 7: states_before[2]}
    assert {slot: b.state_of(slot) for slot in range(1, 9)} == expected
    assert b.bytes_of(8) == b.bytes_of(4) and b.bytes_of(9) == b.bytes_of(1) and b.pinned() == 0


def test_a_boundary_is_where_the_tree_has_a_state_and_nowhere_else(stateful: Any) -> None:
    b, keys = stateful(), keys_of(8)
    assert store(b, keys, 6, state=None) == [True]
    assert found(b, "r", keys[:6]) == [] and b.linker.known_of("r") == 6
    assert store(b, keys, 8, start=6, checkpoint=end(8, begin=6)) == [True]
    assert found(b, "s", keys) == [8] and found(b, "t", keys[:7]) == []
    other = keys_of(8, seed=1)
    assert store(b, other, 2, checkpoint=end(2, lasting=False)) == [True]
    assert found(b, "u", other[:2]) == [], "in the middle of a prompt, and not far enough from the last one"


def test_all_boundaries_are_named_where_several_ranks_must_agree(stateful: Any) -> None:
    b, keys = stateful(), keys_of(8)
    b.linker._requests._alone = False
    for start, count in ((0, 2), (2, 5), (5, 8)):
        store(b, keys, count, start=start)
    assert found(b, "r", keys) == [2, 5, 8] and found(b, "s", keys[2:], keys[:2]) == [3, 6]


def test_a_state_of_another_page_or_of_no_single_slot_is_not_stored(stateful: Any) -> None:
    import torch

    b, keys = stateful(), keys_of(8)
    state = b.state(keys[6], 3)
    b.linker.offloads_for(b.req("o"), end(8))
    for transfer in (state, b.state(keys[7], 0)):
        b.linker.before_offload([], lambda: b.slots(HEAD))
        assert b.linker.offload([*b.transfer(keys, HEAD), transfer])
    transfer.device_indices = torch.tensor([3, 4])
    b.linker.before_offload([], lambda: b.slots(HEAD))
    assert b.linker.offload([*b.transfer(keys, HEAD), transfer])
    assert eventually(lambda: b.linker.num_completed_offloads() == 3)
    assert found(b, "r", keys) == []
    assert b.linker.stats()["engine"]["events"] == {"blocks_stored": 8}


def test_boundaries_far_back_are_found_on_the_grid_of_the_extra_buffer(
    stateful: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtier.connectors import boundaries

    monkeypatch.setattr(boundaries, "TRIED", 2)
    b, keys = stateful(grid=4 * PAGE), keys_of(8)
    assert b.linker._beside.step == 4
    store(b, keys, 3)
    store(b, keys, 4, start=3)
    store(b, keys, 7, start=4)
    store(b, keys, 8, start=7, state=None)
    assert found(b, "r", keys) == [7] and b.linker.known_of("r") == 8
    assert found(b, "s", keys[:6]) == [4] and found(b, "t", keys[:3]) == [3], "one near by may lie off it"
    assert found(b, "u", keys[:7]) == [7] and b.linker.known_of("u") == 4, "where a prompt can leave a state"
    assert found(b, "v", keys[4:6], keys[:4]) == [], "the device has it"
    host = b.linker._pages.cache.manager.host
    gone = set(b.linker._beside.keys(b.chain(keys), 4))
    assert sum(host.drop_where(lambda number: host.index.table.keys[number] in gone)) == BLOCKS
    b.linker._pages.cache.evict("g3")
    assert found(b, "w", keys[:6]) == [], "3 is neither near nor on it"


@pytest.mark.parametrize("part", [1, 2], ids=["convolution", "state"])
def test_a_boundary_that_a_part_could_not_copy_is_not_published(
    stateful: Any, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    b, keys = stateful(), keys_of(8)
    with monkeypatch.context() as patch:
        patch.setattr(b.linker._pages._engine._engines[part], "store", _fails)
        assert store(b, keys) == [False]
    assert found(b, "r", keys) == [], "the chain alone is of no use"
    assert b.linker.stats()["engine"]["events"]["blocks_stored"] == 8, "nor is a part of a state"
    b.linker._pages.cache.check()
    assert store(b, keys) == [True], "the tree asks again"
    assert found(b, "s", keys) == [8] and b.pinned() == 0


@pytest.mark.parametrize("part", [0, 1, 2], ids=["pages", "convolution", "state"])
def test_a_load_that_a_part_could_not_make_fails_as_a_whole(
    stateful: Any, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    b, keys = stateful(), keys_of(8)
    store(b, keys)
    assert found(b, "r", keys) == [8] and load(b, "r", keys, list(range(21, 29)), 5)
    with monkeypatch.context() as patch:
        patch.setattr(b.linker._pages._engine._engines[part], "load", _fails)
        assert not b.run()
    assert b.pinned() == 0 and b.linker.stats()["engine"]["events"]["load_failures"] == 1
    b.linker.forget("r")
    assert found(b, "s", keys) == [8] and load(b, "s", keys, list(range(21, 29)), 5) and b.run()
    assert b.state_of(5) == b.state_of(3)


def _fails(*_: Any) -> int:
    raise RuntimeError("the device is gone")


@pytest.mark.parametrize("place", range(BLOCKS))
def test_a_state_that_has_lost_a_block_is_none(stateful: Any, place: int) -> None:
    """Found before, and gone since; a shorter boundary serves until it is back."""
    b, keys = stateful(), keys_of(8)
    store(b, keys, 5, state=2)
    store(b, keys, 8, start=5)
    assert found(b, "r", keys) == [8]
    host = b.linker._pages.cache.manager.host
    lost = b.linker._beside.keys(b.chain(keys), 8)[place]
    assert b.linker._pages.cache.flush(20).pending == 0
    assert sum(host.drop_where(lambda number: host.index.table.keys[number] == lost)) == 1
    assert not load(b, "r", keys, list(range(21, 29)), 5)
    b.linker.forget("r")
    evicted = b.linker._pages.cache.submit(b.linker._pages.cache.manager.lower["g3"].evict([lost]))
    assert evicted.result(20) == 1
    assert found(b, "s", keys) == [5]
    before = b.state_of(2)
    assert load(b, "s", keys[:5], list(range(21, 26)), 5) and b.run() and b.state_of(5) == before
    b.linker.forget("s")
    assert b.pinned() == 0


def test_a_load_into_no_single_slot_is_refused(stateful: Any) -> None:
    import torch

    b, keys = stateful(), keys_of(8)
    store(b, keys)
    assert found(b, "r", keys) == [8]
    state = b.state(keys[-1], 5)
    for slots in ([], [4, 5], [0]):
        state.device_indices = torch.tensor(slots, dtype=torch.int64)
        assert not b.linker.load("r", [*b.transfer(keys, list(range(21, 29))), state])
    b.linker.forget("r")
    assert b.pinned() == 0


def test_a_state_without_room_is_not_stored_in_part(stateful: Any) -> None:
    block = stateful().pool.block_bytes
    b, keys = stateful(g2=f"{9 * block}B"), keys_of(8)
    assert b.linker._pages.cache.manager.host.arena.slots < 8 + BLOCKS
    assert store(b, keys) == [False], "the tree asks again"
    assert found(b, "r", keys) == []
    b.linker._pages.cache.check()


def test_bytes_of_other_blocks_are_not_stored_behind_those_of_a_state(stateful: Any) -> None:
    b, keys = stateful(), keys_of(8)
    index, arena = b.linker._pages.cache.manager.host.index, b.linker._pages.cache.manager.host.arena
    for number in range(arena.slots):
        (piece,) = arena.pieces(number)
        piece[:] = b"\xaa" * len(piece)
    store(b, keys)
    for name, part in zip(b.linker._beside.keys(b.chain(keys), 8), b.pool.states, strict=True):
        used = part.shape.block_bytes
        rest = bytes(index.get(name).pieces[0][used : b.pool.block_bytes])
        assert used < b.pool.block_bytes and rest == bytes(len(rest))


def test_what_lies_on_disk_is_promoted_with_its_state(stateful: Any) -> None:
    b, keys = stateful(), keys_of(8)
    store(b, keys, 5, state=2)
    store(b, keys, 8, start=5)
    cache, state = b.linker._pages.cache, b.state_of(3)
    assert cache.flush(20).pending == 0
    cache.evict("g2")
    assert b.lengths("s", keys) == [], "it waits"
    assert found(b, "s", keys) == [8]
    assert load(b, "s", keys, list(range(21, 29)), 5) and b.run() and b.state_of(5) == state
    b.linker.forget("s")
    assert b.pinned() == 0


def test_salts_and_aborted_requests(stateful: Any) -> None:
    b, keys = stateful(), keys_of(8)
    store(b, keys, salt="alice")
    assert found(b, "r", keys) == [] and found(b, "s", keys, salt="alice") == [8]
    untouched = b.state_of(5)
    assert load(b, "s", keys, list(range(21, 29)), 5)
    assert b.linker.cancel_queued_load("s") and b.linker.start_layer_wise_loading() == -1
    assert b.state_of(5) == untouched and b.pinned() == 0


def test_states_of_latent_attention_are_each_ranks_own(stateful: Any) -> None:
    b, keys = stateful(latent=True), keys_of(8)
    assert b.pool.kind == "mla" and not b.pool.replicated
    store(b, keys)
    state, latent = b.state_of(3), [b.bytes_of(page) for page in HEAD]
    assert found(b, "r", keys) == [8] and load(b, "r", keys, list(range(21, 29)), 5) and b.run()
    assert b.state_of(5) == state and [b.bytes_of(page) for page in range(21, 29)] == latent


@pytest.mark.parametrize("salt", [None, "alice"])
def test_a_state_that_waits_for_its_copy_while_its_tenant_is_purged_is_not_stored(
    stateful: Any, monkeypatch: pytest.MonkeyPatch, salt: str | None
) -> None:
    b, keys, others = stateful(), keys_of(8), keys_of(8, seed=1)
    cache, engine = b.linker._pages.cache, b.linker._pages._engine
    with monkeypatch.context() as patch:
        patch.setattr(engine, "poll", list)
        for name, asked in ((salt, keys), ("bob", others)):
            assert b.offload(asked, HEAD, state=3, checkpoint=end(8), path=HEAD, salt=name)
        assert not b.settle()
        cache.purge(salt)
    assert settled(b) == [True, True]
    assert found(b, "r", keys, salt=salt) == [] and b.linker.known_of("r") == 0
    assert found(b, "s", others, salt="bob") == [8], "another tenant's stay"
    cache.check()
    assert b.pinned() == 0
    assert store(b, keys, salt=salt) == [True], "what is computed after the purge is kept"
    assert found(b, "t", keys, salt=salt) == [8]


def test_copies_keep_no_more_states_than_the_engine_can_spare(stateful: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 slots, a request may need 5: its own, two that it tracks, the one in the tree that it goes on from, and one
    to put in place of what it leaves there. While copies are slow, each of its chunks leaves one that waits. A node
    without a state may be given one while it waits."""
    b = stateful()

    def offload(seed: int, state: int | None = 3) -> bool:
        path = HEAD[:2]
        return bool(b.offload(keys_of(2, seed), path, state=state, checkpoint=end(2), path=path))

    with monkeypatch.context() as patch:
        patch.setattr(b.linker._pages._engine, "poll", list)
        assert [offload(seed, None if seed == 1 else 3) for seed in range(5)] == [True, True, True, False, False]
        assert not b.settle()
    assert b.linker.stats()["engine"]["events"]["stores_put_off"] == 2
    assert settled(b) == [True] * 3
    assert offload(3), "the tree offers it again"
    assert settled(b) == [True] and found(b, "r", keys_of(2, 3)) == [2] and found(b, "s", keys_of(2, 4)) == []


def test_a_pool_that_has_no_state_to_spare_is_refused(stateful: Any) -> None:
    from kvtier.errors import IdentityError

    stateful(slots=6)
    with pytest.raises(IdentityError, match="max-mamba-cache-size 6"):
        stateful(slots=5)


@pytest.mark.parametrize("session", [None, "kept"])
def test_a_request_that_waits_for_its_blocks_holds_no_slot_of_the_engines_states(
    stateful: Any, monkeypatch: pytest.MonkeyPatch, session: str | None
) -> None:
    """The engine takes one where it matches the prompt, before it is told that the request is passed over. A session's
    slot is not the match's."""
    import torch
    from sglang.srt.managers.schedule_batch import ReqKvInfo
    from sglang.srt.managers.schedule_policy import AddReqResult

    from kvtier.connectors.sglang.hooks import _add_one_req

    b = stateful()
    allocator, admitted = b.requests.mamba_allocator, []
    allocator.alloc(allocator.available_size() - 3)
    free = allocator.available_size()
    tree = SimpleNamespace(linker=SimpleNamespace(cache_linker=b.linker), req_to_token_pool=b.requests)
    adder = SimpleNamespace(tree_cache=tree, can_run_list=[])
    monkeypatch.setattr(b.linker, "awaited", lambda rid: rid != "last")
    for rid in ("one", "two", "three", "four", "last")[3 if session else 0 :]:
        slot = allocator.alloc(1)
        assert slot is not None, "requests that wait have taken them all"
        kv = ReqKvInfo(mamba_pool_idx=slot[0], mamba_cow_src_index=torch.tensor([1]))
        req = SimpleNamespace(rid=rid, kv=kv, session=session)
        outcome = _add_one_req(lambda _, req: admitted.append(req.rid), adder, req)
        waits = rid != "last"
        assert outcome is (AddReqResult.CONTINUE if waits else None)
        assert kv.holds_mamba == (not waits or session is not None)
        assert (kv.mamba_cow_src_index is None) == (waits and session is None)
    assert admitted == ["last"] and allocator.available_size() == free - (2 if session else 1)
