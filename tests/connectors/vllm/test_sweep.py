"""Configurations of a real engine, with prefix caching and without: the tokens of an engine without kvtier."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm.support.configurations import Row, swept, with_paths
from tests.connectors.vllm.support.prompts import IDLE, prompt, tiers
from tests.connectors.vllm.support.storms import storm
from tests.connectors.vllm.test_engine_off import tokenizer

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

Start = Callable[..., Any]
GROUPS = swept()


def answers(engine: Any, rows: list[Row], adapter: Path, *, loads: bool = True) -> list[tuple[Any, dict[str, int]]]:
    """What each row's requests got, and what they read. A request of several answers tells what the last of them read,
    which is nothing where the first has loaded the prompt into the engine's own cache: then, what the engine counted.
    """
    found = []
    for place, row in enumerate(rows):
        prompts = [prompt(10 * place + seed, row.length) for seed in range(row.count)]
        asked = {**row.asked, **({"adapter": ["tuned", 1, str(adapter)]} if row.asked.get("adapter") else {})}
        several, read = loads and "n" in row.asked.get("sampling", {}), dict[str, int]()
        before = engine.counters().get("tokens_read_g2", 0) if several else 0
        got = engine.ask(prompts=prompts, **asked)
        for one in got:
            read |= one["read"]
        if several:
            read["g2"] = engine.counters().get("tokens_read_g2", 0) - before
        found.append(([one["all"] for one in got], read))
    return found


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("group", GROUPS)
def test_a_configuration_gives_the_tokens_of_a_plain_engine(
    start: Start,
    make_checkpoint: Callable[[int], Path],
    make_other: Callable[[str], Path],
    write_adapter: Callable[[Path, int], Path],
    tmp_path: Path,
    group: str,
    caching: bool,
) -> None:
    """Cold, warm, and while clients go away. Every row reads from the tiers, so that this is no test of a cache that is
    off."""
    makes: dict[str, Callable[[Any], object]] = {
        "checkpoint": make_checkpoint, "other": make_other, "words": lambda _: tokenizer(tmp_path / "words")
    }  # fmt: skip
    rows, adapter = GROUPS[group], write_adapter(tmp_path / "adapter", 1)
    options = with_paths(rows[0].engine, lambda kind, which: str(makes[kind](which)))
    model = {"model": options.pop("model")} if "model" in options else {}
    options = {**options, "enable_prefix_caching": caching}
    plain = start(config=None, engine=options, **model)
    right = [got for got, _ in answers(plain, rows, adapter, loads=False)]
    asked = [prompt(900 + i // 2, 200) + prompt(950 + i, 100) for i in range(6)]
    right_in_storm = [plain.generate(prompts=[one])[0]["tokens"] for one in asked]
    plain.kill()
    engine = start(config=tiers(tmp_path), engine=options, **model)
    cold = answers(engine, rows, adapter)
    engine.settle()
    assert [got for got, _ in cold] == right
    assert engine.reset()
    warm = answers(engine, rows, adapter)
    assert [got for got, _ in warm] == right
    for row, (_, read) in zip(rows, warm, strict=True):
        assert read.get("g2") or "beam" in row.asked, row.name
    assert engine.counters()["tokens_read_g2"] > 0
    engine.settle()
    assert engine.check() == IDLE
    storm(engine, asked, right_in_storm, random.Random(f"{group} {caching}"), turns=24)
    assert engine.stop() == 0
