"""The linker refuses an SGLang, or neighbours, that would leave it without its hooks."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("on_cpu")

ADMISSION = "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req"


def _hook(*_: Any) -> None:
    pass


def test_hooks_are_installed_once() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    from kvtier.connectors.sglang.hooks import install

    install()
    install()
    assert ADMISSION in HookRegistry._patched
    assert len(HookRegistry._hooks[ADMISSION]) == 1


def test_what_a_release_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.connectors.sglang import hooks as sglang_hooks
    from kvtier.errors import ConfigError

    monkeypatch.setattr(sglang_hooks, "_HOOKS", ((f"{ADMISSION}_of_another_release", "around", _hook),))
    with pytest.raises(ConfigError, match=r"add_one_req_of_another_release.*use sglang 0\.5\.23"):
        sglang_hooks.install()


def test_a_plug_in_that_was_loaded_without_ours_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.connectors.sglang import hooks as sglang_hooks
    from kvtier.errors import ConfigError

    sglang_hooks.install()
    monkeypatch.setattr(sglang_hooks, "_HOOKS", ((ADMISSION, "around", _hook),))
    with pytest.raises(ConfigError, match="SGLANG_PLUGINS"):
        sglang_hooks.install()


def test_each_way_to_new_weights_is_noticed_before_any_byte_of_them_changes() -> None:
    """A session's weights may be written from outside of the engine (RDMA) between its begin and its end, and blocks
    that are computed meanwhile are of neither's name."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    from kvtier.connectors.sglang.hooks import _HOOKS

    verb = re.compile(r"update_weights_|\w+_weight_update$")
    ways = [name for name in vars(SchedulerWeightUpdaterManager) if verb.match(name)]
    ways = [name for name in ways if name != "flush_cache_after_weight_update"]
    hooked = {target.rpartition(".")[2]: kind for target, kind, _ in _HOOKS}
    assert len(ways) >= 6
    assert [name for name in ways if hooked.get(name) != "before"] == []


def test_what_the_tree_has_is_told_after_a_routers_books_are_emptied() -> None:
    """The first requests of new weights are in the tree before the linker's next events are taken: a router that heard
    of them before it forgot all blocks did not know of them for as long as the tree had them."""
    from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved

    from kvtier.connectors.sglang.hooks import _HOOKS, LinkerListener

    (take,) = (hook for target, _, hook in _HOOKS if target.endswith(".take_events"))
    tree, early, late = (BlockRemoved(block_hashes=[number], medium="GPU") for number in range(3))
    kind: Any = type("Told", (LinkerListener,), {})
    kind.__abstractmethods__ = frozenset()
    cache = SimpleNamespace(linker=SimpleNamespace(cache_linker=(listener := kind())))
    for own, told in (
        ([], [tree]),
        ([late], [tree, late]),
        ([AllBlocksCleared(), late], [AllBlocksCleared(), tree, late]),
        ([early, AllBlocksCleared()], [early, AllBlocksCleared(), tree]),
    ):
        listener.kv_events = lambda own=own: own
        assert take(lambda _: [tree], cache) == told
