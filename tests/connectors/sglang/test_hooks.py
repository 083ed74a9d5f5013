"""The linker refuses an SGLang, or neighbours, that would leave it without its hooks."""

from __future__ import annotations

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
