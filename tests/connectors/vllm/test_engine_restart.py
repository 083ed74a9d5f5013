"""What an engine leaves on disk for the next one. Ends the engine of test_engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm.support.prompts import prompt

pytestmark = pytest.mark.timeout(600)


def seeds_its_hashes_at_random() -> bool:
    """Up to 0.28, unless PYTHONHASHSEED says otherwise."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return False
    return "DEFAULT_NONE_HASH_SEED" not in (Path(spec.origin).parent / "v1" / "core" / "kv_cache_utils.py").read_text()


def test_a_fresh_process_finds_what_the_last_one_wrote(
    engine: Any, start: Callable[..., Any], config: dict[str, Any]
) -> None:
    """G2 is lost with the process, G3 is warm; the second engine runs in processes of its own, as in production."""
    engine.generate(prompts=[prompt(4)])  # for when no other test has stored it before new weights came
    engine.flush()
    assert engine.stop() == 0
    second = start(config=config, processes="own")
    warm = second.generate(prompts=[prompt(4)])[0]
    assert warm["read"] == {"g3": 288}
    cold = second.generate(prompts=[prompt(4)], control={"load": False})[0]
    assert cold["tokens"] == warm["tokens"]
    assert second.stop() == 0


@pytest.mark.long
@pytest.mark.skipif(not seeds_its_hashes_at_random(), reason="this vLLM's block hashes are the same in all processes")
def test_hashes_that_are_random_in_every_process_are_refused_with_advice(
    start: Callable[..., Any], config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(AssertionError, match="set PYTHONHASHSEED=0 for the engine and all replicas"):
        start(config=config)
