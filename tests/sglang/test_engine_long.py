"""SGLang engines that end and start again over what an earlier one left, and 500 requests over sick tiers."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

PROMPT_PAGES = 24
SEEDS = range(6)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("g3")


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("g4")


def tiers(disk: Path, bucket: Path) -> dict[str, Any]:
    return {
        "g2": {"capacity": "16MiB"},
        "g3": {"path": str(disk), "capacity": "256MiB"},
        "g4": {"url": f"file://{bucket}", "stride": 4},
    }


def stored_by(engine: Any, tier: str, blocks: int) -> None:
    deadline = time.monotonic() + 60
    while engine.metric("kvtier_tier_stored_blocks_total", tier=tier, outcome="stored") < blocks:
        assert time.monotonic() < deadline, f"{tier} did not get {blocks} blocks"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    """Tokens of the engine's own prefix hits, by seed, as the first engine gave them."""
    return {}


def test_one_engine_stores_and_is_killed_while_it_stores(
    serve: Any, disk: Path, bucket: Path, prompt: Any, expected: dict[int, list[int]]
) -> None:
    engine = serve(tiers(disk, bucket))
    for seed in SEEDS:
        engine.host.generate(prompt(seed))
        (own,) = engine.host.generate(prompt(seed))
        assert own["host"] == 0 < own["cached"]
        expected[seed] = own["tokens"]
    stored_by(engine, "g4", len(SEEDS) * PROMPT_PAGES)
    more = [prompt(seed, 800) for seed in range(900, 930)]
    writing = threading.Thread(target=lambda: engine.host.process.poll() or _try(engine, more), daemon=True)
    writing.start()
    time.sleep(3)
    engine.host.kill()


def _try(engine: Any, prompts: list[list[int]]) -> None:
    try:
        engine.host.ask(do="generate", prompts=prompts, new=1)
    except BaseException:  # the engine is killed meanwhile
        pass


def test_after_kill_9_the_next_engine_is_served_from_the_disk(
    serve: Any, disk: Path, bucket: Path, prompt: Any, expected: dict[int, list[int]]
) -> None:
    engine = serve(tiers(disk, bucket))
    for seed in SEEDS:
        (restored,) = engine.host.generate(prompt(seed))
        assert restored["host"] == PROMPT_PAGES * 16, seed
        assert restored["tokens"] == expected[seed]
    assert engine.metric("kvtier_tier_hit_blocks_total", tier="g3") + engine.metric(
        "kvtier_tier_loaded_blocks_total", tier="g3"
    )


def test_an_engine_on_another_machine_is_served_from_the_bucket(
    serve: Any, bucket: Path, prompt: Any, expected: dict[int, list[int]], tmp_path: Path
) -> None:
    engine = serve(tiers(tmp_path, bucket))
    for seed in SEEDS:
        (restored,) = engine.host.generate(prompt(seed))
        assert restored["host"] == PROMPT_PAGES * 16, seed
        assert restored["tokens"] == expected[seed]
    assert engine.metric("kvtier_tier_loaded_blocks_total", tier="g4") >= len(SEEDS) * PROMPT_PAGES


@pytest.mark.parametrize("medium", ["disk"])
def test_flipped_bits_on_the_medium_are_never_served(
    serve: Any, prompt: Any, expected: dict[int, list[int]], tmp_path: Path, medium: str
) -> None:
    engine = serve({"g2": {"capacity": "16MiB"}, "g3": {"path": str(tmp_path), "capacity": "256MiB"}})
    for seed in SEEDS:
        engine.host.generate(prompt(seed))
    stored_by(engine, "g3", len(SEEDS) * PROMPT_PAGES)
    for seed in range(300, 320):  # out of G2
        engine.host.generate(prompt(seed, 800), new=1)
        engine.host.flush()
    damaged = 0
    for file in sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 1 << 20):
        if "mdb" in file.name:
            continue
        with open(file, "r+b") as stream:
            for offset in range(0, file.stat().st_size, 4096):
                stream.seek(offset + 7)
                byte = stream.read(1)
                if byte:
                    stream.seek(offset + 7)
                    stream.write(bytes([byte[0] ^ 1]))
                    damaged += 1
    assert damaged
    for seed in SEEDS:
        (answer,) = engine.host.generate(prompt(seed))
        assert answer["host"] == 0
        assert answer["tokens"] == expected[seed]
    assert engine.metric("kvtier_tier_miss_blocks_total", tier="g3", reason="corrupt") > 0


def test_500_requests_over_sick_tiers(serve: Any, prompt: Any, expected: dict[int, list[int]], tmp_path: Path) -> None:
    """Errors, hangs and lost answers on both lower tiers, a G2 and a G3 too small: every answer comes, and is right."""
    (tmp_path / "g4").mkdir()
    small = {
        "g2": {"capacity": "2MiB"},
        "g3": {"path": str(tmp_path / "g3"), "capacity": "8MiB"},
        "g4": {"url": f"file://{tmp_path / 'g4'}", "stride": 4},
    }
    (tmp_path / "g3").mkdir()
    engine = serve(small, deadlines={"get": "1s", "lookup": "100ms"})
    draw = random.Random(1)
    kinds = ("error", "crash", "hang", "drop", "slow")
    asked = served = 0
    while asked < 500:
        faults = {
            tier: [
                [verb, draw.choice(kinds), draw.choice((0.1, 0.5, 1.0)), None, 0.2]
                for verb in ("read", "write", "lookup")
            ]
            for tier in ("g3", "g4")
        }
        engine.steer(**({"faults": faults} if draw.random() < 0.8 else {}))
        seeds = [draw.choice(list(SEEDS)) for _ in range(5)]
        answers = engine.host.generate(*[prompt(seed) for seed in seeds])
        for seed, answer in zip(seeds, answers, strict=True):
            assert answer["tokens"] == expected[seed]
            served += answer["host"] > 0
        asked += len(seeds)
        if draw.random() < 0.7:
            engine.host.flush()
    assert served > 0
