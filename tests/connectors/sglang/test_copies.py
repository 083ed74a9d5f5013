"""Copies of a linker's pages: on a thread of their own, behind the forward that runs, and given up when they do not
end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from kvtier.errors import KVTierError
from tests.connectors.sglang.support.linker_bench import keys_of
from tests.support.waiting import eventually


@pytest.fixture
def pumped(bench: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes a linker whose copies are another thread's, as on a GPU."""
    from kvtier.connectors.sglang.linker import KVTierLinker
    from kvtier.connectors.sglang.pool import KVPools

    def make(**changed: Any) -> Any:
        monkeypatch.setattr(KVPools, "on_gpu", True)
        monkeypatch.setattr(KVTierLinker, "_ordering_stream", lambda self: None)
        return bench(**changed)

    return make


def settled(b: Any, count: int) -> list[bool]:
    answers: list[bool] = []
    assert eventually(lambda: answers.extend(b.settle()) or len(answers) >= count)
    return answers


def test_pages_move_by_another_thread(pumped: Any) -> None:
    b, keys = pumped(), keys_of(4)
    assert eventually(lambda: b.linker._pages.ready)
    for _ in range(2):
        assert b.offload(keys, [3, 1, 4, 2])
        assert settled(b, 1) == [True]
    expected = [b.bytes_of(p) for p in (3, 1, 4, 2)]
    assert b.lookup("r", keys) == 4
    assert b.linker.load("r", b.transfer(keys, [6, 8, 5, 7]))
    index = b.linker.start_layer_wise_loading()
    counter = b.linker.layer_done_counter
    counter.set_consumer(index)
    for layer in range(counter.num_layers):
        counter.wait_until(layer)
    assert [b.bytes_of(p) for p in (6, 8, 5, 7)] == expected, "a fence without streams is the copy"
    assert b.linker.finish_layer_wise_loading(index)
    assert b.pinned() == 0
    thread = b.linker._pages._engine._thread
    b.linker.close()
    thread.join(20.0)
    assert not thread.is_alive(), "it ends with the cache"


def test_nothing_is_offered_until_copies_are_possible(pumped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.connectors.sglang import copies

    may_open, opening = threading.Event(), copies.open_engine

    def slow(*arguments: Any, **options: Any) -> Any:
        assert may_open.wait(20.0)
        return opening(*arguments, **options)

    monkeypatch.setattr(copies, "open_engine", slow)
    b, keys = pumped(), keys_of(2)
    assert b.offload(keys, [1, 2]) and b.settle() == [False]
    assert b.lookup("r", keys) == 0 and not b.linker.load("r", b.transfer(keys, [5, 6]))
    assert b.linker.stats()["engine"]["events"] == {"stores_without_copies": 2, "lookups_without_copies": 1}
    may_open.set()
    assert eventually(lambda: b.linker._pages.ready)
    assert b.offload(keys, [1, 2]) and settled(b, 1) == [True]
    assert b.lookup("s", keys) == 2


def test_copies_that_cannot_be_opened_leave_the_engine_without_a_cache(
    pumped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtier.connectors.sglang import copies

    monkeypatch.setattr(copies, "open_engine", lambda *_, **__: 1 / 0)
    b, keys = pumped(), keys_of(2)
    assert eventually(lambda: b.linker._pages._engine.failure)
    assert b.offload(keys, [1, 2]) and b.settle() == [False]
    assert b.lookup("r", keys) == 0 and not b.linker.load("r", b.transfer(keys, [5, 6]))
    b.flush()


def test_a_pump_that_fails_in_the_midst_of_a_load_fails_it(pumped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was copied: the request ends, and the engine lives."""
    from kvtier.kernels.copy import CopyEngine

    b, keys = pumped(), keys_of(2)
    assert eventually(lambda: b.linker._pages.ready)
    b.offload(keys, [1, 2])
    settled(b, 1)
    b.lookup("r", keys)
    assert b.linker.load("r", b.transfer(keys, [5, 6]))
    with monkeypatch.context() as patch:
        patch.setattr(CopyEngine, "load", lambda *_, **__: 1 / 0)
        assert not b.run()
    assert b.pinned() == 0 and b.linker.stats()["engine"]["events"]["load_failures"] == 1
    b.lookup("s", keys)
    assert b.linker.load("s", b.transfer(keys, [5, 6])) and b.run()


def test_loads_and_offloads_wait_for_the_forward_that_runs(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that were freed when it had been launched are handed out to a load, and the forward writes to them yet."""
    from kvtier.connectors.sglang.linker import KVTierLinker

    behind: list[int] = []
    real = KVTierLinker._behind_writers
    monkeypatch.setattr(KVTierLinker, "_behind_writers", lambda self, submit: (behind.append(1), real(self, submit))[1])
    b, keys = bench(), keys_of(2)
    b.offload(keys, [1, 2])
    b.settle()
    assert len(behind) == 1
    b.lookup("r", keys)
    assert b.linker.load("r", b.transfer(keys, [5, 6])) and b.run()
    assert len(behind) == 2


class Event:
    """A point that the device has not come to yet."""

    reached = False

    def query(self) -> bool:
        return self.reached


def waiting(b: Any, monkeypatch: pytest.MonkeyPatch, verb: str) -> Event:
    """Copies of this verb are begun and wait for the event."""
    event, engine = Event(), b.linker._pages._engine
    real = getattr(engine, verb)
    monkeypatch.setattr(engine, verb, lambda moves: real(moves, after=event))
    return event


def test_a_load_that_does_not_end_ends_the_engine(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages would be handed out again while it may write into them."""
    from kvtier.connectors.sglang import copies

    monkeypatch.setattr(copies, "_LAST_S", 0.02)
    b, keys = bench(deadlines={"get": "20ms"}), keys_of(2)
    b.offload(keys, [1, 2])
    b.settle()
    b.lookup("r", keys)
    event = waiting(b, monkeypatch, "load")
    assert b.linker.load("r", b.transfer(keys, [5, 6]))
    with pytest.raises(KVTierError, match="restart the engine"):
        b.run()
    event.reached = True


def test_a_load_that_ends_late_is_a_failed_one(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    b, keys = bench(deadlines={"get": "20ms"}), keys_of(2)
    b.offload(keys, [1, 2])
    b.settle()
    b.lookup("r", keys)
    event, engine = waiting(b, monkeypatch, "load"), b.linker._pages._engine
    assert b.linker.load("r", b.transfer(keys, [5, 6]))
    index = b.linker.start_layer_wise_loading()
    given_up = engine.cancel
    monkeypatch.setattr(engine, "cancel", lambda ticket: (given_up(ticket), setattr(event, "reached", True)))
    assert not b.linker.finish_layer_wise_loading(index)
    assert b.pinned() == 0


def test_what_was_not_copied_when_the_tree_was_emptied_is_never_stored(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages belong to others by then."""
    b, keys = bench(deadlines={"get": "20ms"}), keys_of(2)
    event = waiting(b, monkeypatch, "store")
    assert b.offload(keys, [1, 2])
    b.flush()
    for layer in b.pool.tensors:
        for tensor in layer:
            tensor.zero_()
    event.reached = True
    assert b.linker.num_completed_offloads() == 0
    assert b.lookup("r", keys) == 0, "zeros under the name of what was there"
    b.linker._pages.cache.check()


def test_what_was_not_copied_when_the_weights_changed_is_never_stored(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tree is told that these copies have failed, and hands their pages out again, while the old cache is closed
    by another thread: stored, they would be found by an engine of the old weights."""
    b, keys = bench(), keys_of(2)
    assert b.offload(keys, [1, 2]) and settled(b, 1) == [True]
    event = waiting(b, monkeypatch, "store")
    late = keys_of(2, seed=1)
    assert b.offload(late, [3, 4])
    b.linker.weights_change()
    assert b.settle() == [False]
    for layer in b.pool.tensors:
        for tensor in layer:
            tensor.zero_()
    event.reached = True
    assert b.linker._rotation.join(30)
    again = bench()
    assert again.until_promoted("r", keys) == 2, "what was copied by then is kept"
    assert again.until_promoted("s", late) == 0, "zeros under the name of what was there"


def test_a_load_under_way_when_the_weights_change_ends_as_it_would(
    pumped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that closes the old cache and the scheduler's both take acknowledgements: whoever does not get that
    of the load waits until the other has followed it. Else it would pass for a copy that does not end."""
    b, keys = pumped(deadlines={"get": "20s"}), keys_of(2)
    assert eventually(lambda: b.linker._pages.ready)
    assert b.offload(keys, [1, 2]) and settled(b, 1) == [True]
    assert b.lookup("r", keys) == 2
    expected = [b.bytes_of(page) for page in (1, 2)]
    event, engine, taken = waiting(b, monkeypatch, "load"), b.linker._pages._engine, threading.Event()
    poll, scheduler = engine.poll, threading.current_thread()

    def slow() -> Any:
        acks = poll()
        if acks and threading.current_thread() is not scheduler:
            taken.set()
            time.sleep(0.2)
        return acks

    monkeypatch.setattr(engine, "poll", slow)
    assert b.linker.load("r", b.transfer(keys, [5, 6]))
    index = b.linker.start_layer_wise_loading()
    b.linker.weights_change()
    event.reached = True
    assert taken.wait(20.0)
    assert b.linker.finish_layer_wise_loading(index)
    assert [b.bytes_of(page) for page in (5, 6)] == expected
    assert b.linker._rotation.join(30)


def test_no_copy_reads_pages_whose_memory_goes(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`release_memory_occupation` unmaps the pool, and SGLang's own check that the engine is idle does not know of a
    linker's copies: one that is under way would fault in the device, which ends the engine."""
    from kvtier.connectors.sglang import hooks

    b, keys, done = bench(), keys_of(2), []
    event = waiting(b, monkeypatch, "store")
    assert b.offload(keys, [1, 2])
    tree = SimpleNamespace(linker=SimpleNamespace(cache_linker=b.linker))
    updater, target = SimpleNamespace(scheduler=SimpleNamespace(tree_cache=tree)), "release_memory_occupation"
    sleep = next(hook for name, _, hook in hooks._HOOKS if name.endswith(target))
    threading.Timer(0.1, lambda: (done.append(True), setattr(event, "reached", True))).start()
    sleep(updater, SimpleNamespace(tags=["weights"]))
    assert not done, "only the pool's memory matters"
    sleep(updater, SimpleNamespace(tags=None))
    assert done and b.settle() == [True], "completions stay: a tree that is not emptied asks for them"


def test_completions_are_forgotten_with_the_tree_though_the_device_fails(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tree forgets all nodes. A completion that stayed would be taken for that of the next node, whose pages would
    be handed out again while they are copied, and be stored with what others have written there."""
    b, keys = bench(), keys_of(2)
    assert b.offload(keys, [1, 2])
    with monkeypatch.context() as patch:
        patch.setattr(b.linker._pages._engine, "wait", lambda *_: 1 / 0)
        b.flush()
    event = waiting(b, monkeypatch, "store")
    assert b.offload(keys_of(2, seed=1), [3, 4])
    assert b.settle() == []
    event.reached = True
    assert settled(b, 1) == [True]
