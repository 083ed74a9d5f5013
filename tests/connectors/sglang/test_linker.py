"""What a linker moves, refuses and answers for, between two calls of the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.connectors.sglang.support.linker_bench import keys_of, mla


@pytest.mark.parametrize(("kind", "page"), [("mha", 1), ("mha", 16), ("mha", 64), ("mla", 16)])
def test_pages_move_out_and_into_other_places(bench: Any, kind: str, page: int) -> None:
    b, keys = bench(page=page, device=mla() if kind == "mla" else None), keys_of(4)
    assert b.offload(keys, [3, 1, 4, 2])
    assert b.settle() == [True]
    expected = [b.bytes_of(p) for p in (3, 1, 4, 2)]
    assert b.lookup("r", keys) == 4
    assert b.linker.load("r", b.transfer(keys, [6, 8, 5, 7]))
    assert b.run()
    assert [b.bytes_of(p) for p in (6, 8, 5, 7)] == expected


def test_offloading_again_stores_nothing(bench: Any) -> None:
    b, keys = bench(), keys_of(4)
    b.offload(keys, [1, 2, 3, 4])
    b.settle()
    before = b.linker.stats()["requests"]["accepted"]
    assert b.offload(keys, [5, 6, 7, 8])
    assert b.settle() == [True]
    assert b.linker.stats()["requests"]["accepted"] == before == 4


def test_salts_and_parameters_of_requests_are_kept(bench: Any) -> None:
    b, keys = bench(), keys_of(2)
    assert b.offload(keys, [1, 2], salt="alice")
    b.settle()
    assert b.lookup("a", keys, salt="alice") == 2
    assert b.lookup("b", keys, salt="bob") == b.lookup("c", keys) == 0
    assert not b.offload(keys_of(2, 1), [1, 2], store=False)
    assert not b.offload(keys_of(2, 1), [1, 2], retention="none such")
    assert b.lookup("d", keys, salt="alice", load=False) == 0


@pytest.mark.parametrize("salt", [None, "alice"])
def test_pages_that_wait_for_their_copy_while_their_tenant_is_purged_are_not_stored(
    bench: Any, monkeypatch: pytest.MonkeyPatch, salt: str | None
) -> None:
    b, keys, others = bench(), keys_of(2), keys_of(2, 1)
    with monkeypatch.context() as patch:
        patch.setattr(b.linker._pages._engine, "poll", list)
        assert b.offload(keys, [1, 2], salt=salt) and b.offload(others, [3, 4], salt="bob")
        assert not b.settle()
        b.linker._pages.cache.purge(salt)
    assert b.settle() == [True, True]
    assert b.until_promoted("r", keys) == 0 if salt is None else b.lookup("r", keys, salt=salt) == 0
    assert b.lookup("s", others, salt="bob") == 2, "another tenant's stay"
    assert b.pinned() == 0


def test_an_offload_of_nobody_is_refused(bench: Any) -> None:
    b = bench()
    b.linker.before_offload([])
    assert not b.linker.offload(b.transfer(keys_of(1), [1]))


def test_an_adapter_that_has_a_name_on_other_ranks_alone_fails_its_offloads(bench: Any) -> None:
    """Refused, they would leave this rank with fewer completions than the others have, and each rank would take those
    of other nodes from then on. Refused by all alike is what no salt is for, where salts are asked for."""
    b, keys = bench(security={"salt": "deny"}), keys_of(2)
    unnamed = SimpleNamespace(**vars(b.req("o", salt="alice")), lora_id="not loaded here")
    b.linker.offloads_for(unnamed)
    b.linker.before_offload([])
    assert b.linker.offload(b.transfer(keys, [1, 2])) and b.settle() == [False]
    b.linker.offloads_for(None)
    assert not b.offload(keys, [1, 2])


def test_every_offload_has_one_answer(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    b, keys = bench(), keys_of(2)
    with monkeypatch.context() as patch:
        patch.setattr(b.linker._rotation, "current", None)
        assert b.offload(keys, [1, 2])
        assert b.settle() == [False]
    with monkeypatch.context() as patch:
        patch.setattr(b.linker._pages._engine, "store", lambda _: 1 / 0)
        assert b.offload(keys, [1, 2])
    with monkeypatch.context() as patch:
        patch.setattr(b.linker._pages, "offload", lambda *_: 1 / 0)
        assert b.offload(keys, [1, 2])
    assert b.offload(keys, [1, 2])
    assert b.settle() == [False, False, True]
    assert b.linker.stats()["engine"]["events"] == {"copies_failed": 2, "blocks_stored": 2}


def test_a_full_host_ram_fails_the_tail_of_an_offload(bench: Any) -> None:
    b = bench(g2=str(5 * 24576))
    manager = b.linker._pages.cache.manager
    blocks, keys = manager.host.capacity, keys_of(8)
    assert b.offload(keys[:blocks], list(range(1, blocks + 1)))
    b.settle()
    b.lookup("r", keys[:blocks])
    with manager.pin(b.linker._requests.of("r").chain):  # every slot is in use
        assert b.offload(keys_of(2, 1), [9, 10])
        assert b.settle() == [False]
    assert b.lookup("s", keys[:blocks]) == blocks
    manager.check()


def test_a_load_is_refused_when_a_block_has_gone(bench: Any) -> None:
    b, keys = bench(), keys_of(4)
    b.offload(keys, [1, 2, 3, 4])
    b.settle()
    assert b.lookup("r", keys) == 4
    cache = b.linker._pages.cache
    cache.evict("g2")
    assert not b.linker.load("r", b.transfer(keys, [5, 6, 7, 8]))
    assert b.linker.start_layer_wise_loading() == -1
    cache.check()


def test_a_load_that_one_rank_refuses_is_nobodys(bench: Any) -> None:
    b, keys = bench(), keys_of(2)
    b.offload(keys, [1, 2])
    b.settle()
    b.lookup("r", keys)
    b.refusals = 1
    assert not b.linker.load("r", b.transfer(keys, [5, 6]))
    assert b.linker.start_layer_wise_loading() == -1
    assert b.pinned() == 0
    assert b.linker.load("r", b.transfer(keys, [5, 6]))
    assert b.run()


def test_a_queued_load_can_be_cancelled(bench: Any) -> None:
    b, keys = bench(), keys_of(2)
    b.offload(keys, [1, 2])
    b.settle()
    b.lookup("r", keys)
    b.linker.load("r", b.transfer(keys, [5, 6]))
    before = b.bytes_of(5)
    assert not b.linker.cancel_queued_load("stranger")
    assert b.linker.cancel_queued_load("r")
    assert not b.linker.cancel_queued_load("r")
    assert b.linker.start_layer_wise_loading() == -1
    assert b.bytes_of(5) == before
    assert b.pinned() == 0


def loading(b: Any) -> tuple[int, list[bytes]]:
    """A batch whose forward has begun, with two pages on their way into pages 5 and 6; and their bytes."""
    keys = keys_of(2)
    b.offload(keys, [1, 2])
    b.settle()
    b.lookup("r", keys)
    assert b.linker.load("r", b.transfer(keys, [5, 6]))
    index = b.linker.start_layer_wise_loading()
    b.linker.layer_done_counter.set_consumer(index)
    return index, [b.bytes_of(1), b.bytes_of(2)]


def test_a_forward_is_ordered_behind_the_layer_that_it_asks_for(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    b, fenced = bench(), []
    engine = b.linker._pages._engine
    real = engine.fence
    monkeypatch.setattr(engine, "fence", lambda ticket, layer: (fenced.append(layer), real(ticket, layer)))
    index, expected = loading(b)
    assert fenced == [] and [b.bytes_of(5), b.bytes_of(6)] != expected
    for layer in range(b.linker.layer_done_counter.num_layers):
        b.linker.layer_done_counter.wait_until(layer)
        assert [b.bytes_of(5), b.bytes_of(6)] == expected, "without streams the pages are whole at once"
    assert fenced == list(range(b.linker.layer_done_counter.num_layers))
    assert b.linker.finish_layer_wise_loading(index)
    b.linker.layer_done_counter.wait_until(0)  # of a batch that is over: nothing to order
    assert b.pinned() == 0


def test_a_forward_that_could_not_be_ordered_is_reported_at_the_end(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench()
    index, _ = loading(b)
    with monkeypatch.context() as patch:
        patch.setattr(b.linker._pages._engine, "fence", lambda *_: 1 / 0)
        b.linker.layer_done_counter.wait_until(0)
    assert not b.linker.finish_layer_wise_loading(index)
    assert b.pinned() == 0 and b.linker.stats()["engine"]["events"]["load_failures"] == 1


def test_a_layer_that_never_comes_is_reported_at_the_end(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    b, keys = bench(), keys_of(2)
    b.offload(keys, [1, 2])
    b.settle()
    b.lookup("r", keys)
    b.linker.load("r", b.transfer(keys, [5, 6]))

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(b.linker._pages._engine, "load", refuse)
        assert not b.run()
    assert b.pinned() == 0
    b.lookup("s", keys)
    assert b.linker.load("s", b.transfer(keys, [5, 6]))
    assert b.run()


def test_reset_in_the_middle_keeps_what_is_stored(bench: Any) -> None:
    b, keys = bench(), keys_of(4)
    b.offload(keys[:2], [1, 2])
    b.settle()
    b.lookup("r", keys[:2])
    b.linker.load("r", b.transfer(keys[:2], [5, 6]))
    b.offload(keys[2:], [3, 4], head=keys[:2])
    b.linker.reset()
    assert b.linker.num_completed_offloads() == 0
    assert b.linker.start_layer_wise_loading() == -1
    assert b.pinned() == 0
    assert b.lookup("s", keys) == 4


def test_new_weights_leave_the_old_blocks_behind(bench: Any) -> None:
    b, keys = bench(), keys_of(2)
    b.offload(keys, [1, 2])
    b.settle()
    b.offload(keys_of(2, 1), [3, 4])  # its completion is still owed to the tree
    b.linker.weights_change()
    assert b.settle() == [False]
    b.flush()
    assert b.linker._rotation.join(30)
    assert b.lookup("r", keys) == 0
    assert b.offload(keys, [1, 2])
    b.settle()
    assert b.lookup("s", keys) == 2
    b.flush()
    assert b.lookup("t", keys) == 2


def test_nothing_raises_into_the_scheduler(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    b, keys = bench(), keys_of(2)
    b.offload(keys, [1, 2])
    b.settle()
    manager = b.linker._pages.cache.manager

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("broken")

    for verb in ("prefix", "pin", "reserve"):
        with monkeypatch.context() as patch:
            patch.setattr(manager, verb, broken)
            b.lookup("r", keys)
            b.linker.load("r", b.transfer(keys, [5, 6]))
            b.offload(keys_of(2, 9), [1, 2])
            assert b.linker.num_completed_offloads() >= 0
        b.linker.reset()
    with monkeypatch.context() as patch:
        patch.setattr(b.linker._requests._scopes, "of", broken)
        assert b.lookup("r", keys) == 0 and not b.offload(keys_of(2, 9), [1, 2])
    b.linker.reset()
    assert b.lookup("again", keys) == 2


def test_retention_classes_and_token_ranges_reach_the_blocks(bench: Any) -> None:
    b, keys = bench(), keys_of(4)
    b.offload(keys, [1, 2, 3, 4], retention="5m", ranges=[[0, 2 * b.page, "24h"]])
    b.settle()
    assert b.linker.stats()["requests"]["written_tokens"] == {"24h": 2 * b.page, "5m": 2 * b.page}
    ends = [slot.expires_at for slot in map(b.linker._pages.cache.manager.host.index.get, b.chain(keys))]
    assert ends[1] - ends[2] == pytest.approx(24 * 3600 - 300, abs=5)


def test_an_isolated_class_shares_with_its_own_kind_only(bench: Any) -> None:
    b, keys = bench(), keys_of(2)
    b.offload(keys, [1, 2], retention="in_memory")
    b.settle()
    assert b.lookup("same", keys, retention="in_memory") == 2
    assert b.lookup("other", keys) == 0


def test_what_was_reloaded_says_whether_new_weights_keep_blocks(bench: Any) -> None:
    """The other way round: kept blocks would be served under weights that did not make them."""
    b = bench(keep_on_reset=True)
    before = b.linker._rotation.namespace
    b.linker.weights_change()
    assert b.linker._rotation.namespace == before
    b.linker._rotation.follow(b.linker._rotation.config.model_copy(update={"keep_on_reset": False}))
    b.linker.weights_change()
    assert b.linker._rotation.namespace != before


def test_weights_may_be_declared_the_same_ones(bench: Any) -> None:
    b, keys = bench(keep_on_reset=True), keys_of(2)
    b.offload(keys, [1, 2])
    b.settle()
    b.linker.weights_change()
    b.flush()
    assert b.lookup("r", keys) == 2


def test_nothing_is_kept_without_a_salt_where_salts_are_asked_for(bench: Any) -> None:
    b, keys = bench(security={"salt": "deny"}), keys_of(2)
    assert not b.offload(keys, [1, 2])
    assert b.lookup("r", keys) == 0
    assert b.offload(keys, [1, 2], salt="alice")
    b.settle()
    assert b.lookup("s", keys, salt="alice") == 2
