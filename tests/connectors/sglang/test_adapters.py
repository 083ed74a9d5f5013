"""An adapter is what its files held when it was loaded; test_engine_identity.py shows it in an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import kvtier
from kvtier.connectors.sglang import adapters
from kvtier.connectors.sglang.requests import QueuedRequests
from kvtier.identity.keys import Scope
from tests.connectors.support.adapters import write_adapter


@pytest.fixture
def scope(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], Scope | None]:
    """The scope of a request with the adapter of this id, in a process that has loaded none so far."""
    monkeypatch.setattr(adapters, "_loaded", {})
    config: Any = kvtier.Config.parse({})
    requests = QueuedRequests(SimpleNamespace(config=config), 16)  # type: ignore[arg-type]

    def of(number: str | None) -> Scope | None:
        req = SimpleNamespace(extra_key=number, lora_id=number, cache_salt=None, sampling_params=None)
        return requests.control_of(req)[1]

    return of


def loaded(path: Path, seed: int, load: Callable[..., Any] = lambda *_: None) -> None:
    """SGLang's id of an adapter is a digest of its name and path."""
    adapters.load(
        load, None, SimpleNamespace(lora_id="id", lora_path=str(write_adapter(path, seed, layers=1, width=64)))
    )


def test_an_adapter_retrained_at_its_path_has_another_scope(
    scope: Callable[[str | None], Scope | None], tmp_path: Path
) -> None:
    found = []
    for seed in (1, 2, 1):
        loaded(tmp_path, seed)
        found.append(scope("id"))
    assert None not in found and found[0] == found[2] != found[1]
    assert scope(None) not in found


def test_an_adapter_that_changes_while_it_is_loaded_is_not_cached(
    scope: Callable[[str | None], Scope | None], tmp_path: Path
) -> None:
    assert scope("id") is None, "nobody has loaded it"
    loaded(tmp_path, 1, lambda *_: write_adapter(tmp_path, 2, layers=1, width=64))
    assert scope("id") is None
    loaded(tmp_path, 1)
    assert scope("id") is not None, "the control"
