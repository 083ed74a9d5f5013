"""Prompts with images in a real engine: the same tokens show other images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm.support.checkpoints import IMAGE_TOKENS
from tests.connectors.vllm.support.prompts import IDLE, prompt, tiers

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

TEXT = [token % 1000 for token in prompt(1, 200)]


def shown(engine: Any, *images: int) -> list[tuple[list[int], int]]:
    """What is answered about each image, and the tokens that were read for it."""
    found = []
    for seed in images:
        (one,) = engine.ask(prompts=[TEXT], images=[seed])
        found.append((one["all"][0], sum(one["read"].values())))
        engine.settle()
    return found


@pytest.mark.parametrize("caching", [True, False])
def test_each_image_has_its_own_kv(
    start: Callable[..., Any], make_other: Callable[[str], Path], tmp_path: Path, caching: bool
) -> None:
    """Without prefix caching vLLM does not name images by what they show, so nothing is cached."""
    options: dict[str, Any] = {"enable_prefix_caching": caching, "skip_tokenizer_init": False}
    if not caching:
        options["mm_processor_cache_gb"] = 0
    started = {"model": str(make_other("image")), "engine": options}
    plain = start(config=None, **started)
    right = [tokens for tokens, _ in shown(plain, 1, 2, 3)]
    assert len(set(map(tuple, right))) == 3, "the images matter"
    plain.kill()
    engine = start(config=tiers(tmp_path), **started)
    assert shown(engine, 1, 2) == [(right[0], 0), (right[1], 0)]
    assert engine.reset()
    read = (len(TEXT) + IMAGE_TOKENS - 1) // 32 * 32 if caching else 0
    assert shown(engine, 1, 2, 3) == [(right[0], read), (right[1], read), (right[2], 0)]
    if caching:
        assert engine.check() == IDLE
    else:
        assert not engine.has_cache() and any("does not name its images" in line for line in engine.logs())
    assert engine.stop() == 0
