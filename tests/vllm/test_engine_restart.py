"""What an engine leaves on disk for the next one. Ends the engine of test_engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.vllm.prompts import prompt

pytestmark = pytest.mark.timeout(600)


def test_a_fresh_process_finds_what_the_last_one_wrote(
    engine: Any, start: Callable[..., Any], config: dict[str, Any]
) -> None:
    """G2 is lost with the process, G3 is warm; the second engine runs in processes of its own, as in production."""
    fresh_stop = engine.stop()
    assert fresh_stop == 0
    second = start(config=config, processes="own")
    warm = second.generate(prompts=[prompt(4)])[0]
    assert warm["read"] == {"g3": 288}
    cold = second.generate(prompts=[prompt(4)], control={"load": False})[0]
    assert cold["tokens"] == warm["tokens"]
    assert second.stop() == 0
