"""What is open under an engine's namespace is replaced off the engine's thread, once per change of the weights."""

from __future__ import annotations

import threading

import pytest

from kvtier.config import Config
from kvtier.connectors.rotation import Rotation
from kvtier.errors import TierError
from kvtier.identity.namespace import Namespace
from kvtier.testing import sample_namespace


class Trial:
    """Opens names of namespaces, one at a time, when it is let."""

    def __init__(self, **config: object) -> None:
        self.opened: list[bytes] = []
        self.closed: list[bytes] = []
        self.opening = threading.Event()
        self.may_open = threading.Event()
        self.may_open.set()
        self.error: Exception | None = None
        namespace = sample_namespace(4096)
        self.first = namespace.digest
        self.rotation = Rotation(Config.parse({"version": 1, **config}), namespace, self.open, self.closed.append)
        self.rotation.open()

    def open(self, namespace: Namespace) -> bytes:
        self.opening.set()
        assert self.may_open.wait(10)
        if self.error is not None:
            raise self.error
        self.opened.append(namespace.digest)
        return namespace.digest


def test_new_weights_close_the_old_and_open_under_a_name_of_their_own() -> None:
    trial = Trial()
    assert trial.rotation.current == trial.first
    assert trial.rotation.rotate() == trial.first
    assert trial.rotation.join(10)
    assert trial.closed == [trial.first]
    assert trial.rotation.current == trial.rotation.namespace.digest != trial.first


def test_there_is_nothing_while_the_next_one_opens() -> None:
    trial = Trial()
    trial.may_open.clear()
    trial.rotation.rotate()
    assert trial.rotation.current is None
    assert not trial.rotation.join(0.05)
    trial.may_open.set()
    assert trial.rotation.join(10)
    assert trial.rotation.current is not None


def test_a_change_during_a_change_counts_too() -> None:
    trial = Trial()
    trial.may_open.clear()
    for _ in range(3):
        trial.rotation.rotate()
    trial.may_open.set()
    assert trial.rotation.join(10)
    assert trial.rotation.current == trial.opened[-1] == trial.rotation.namespace.digest
    assert sorted(trial.closed) == sorted(trial.opened[:-1])


def test_what_cannot_be_opened_again_leaves_nothing_and_may_come_back() -> None:
    trial = Trial()
    trial.error = TierError("g3", "open", "gone")
    trial.rotation.rotate()
    assert trial.rotation.join(10)
    assert trial.rotation.current is None
    trial.error = None
    trial.rotation.rotate()
    assert trial.rotation.join(10)
    assert trial.rotation.current is not None


def test_the_first_open_says_what_is_wrong() -> None:
    trial = Trial()
    trial.error = TierError("g3", "open", "gone")
    with pytest.raises(TierError):
        trial.rotation.open()


def test_keeping_on_reset_keeps_the_name() -> None:
    trial = Trial(keep_on_reset=True)
    trial.rotation.rotate()
    assert trial.rotation.join(10)
    assert trial.opened == [trial.first, trial.first]


def test_after_the_end_nothing_is_open_whatever_is_under_way() -> None:
    trial = Trial()
    trial.may_open.clear()
    trial.opening.clear()
    trial.rotation.rotate()
    assert trial.opening.wait(10)
    assert not trial.rotation.close(0.05), "it cannot be over: something is being opened"
    trial.may_open.set()
    assert trial.rotation.join(10)
    assert trial.rotation.current is None
    assert sorted(trial.closed) == sorted(trial.opened)
    assert trial.rotation.rotate() is None
