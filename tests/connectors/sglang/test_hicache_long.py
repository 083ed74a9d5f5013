"""A real SGLang engine under HiCache with kvtier as its storage, on a CPU (torch copies for HiCache's kernels)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

PROMPT_PAGES = 24


def stored(engine: Any, blocks: int) -> None:
    """Wait until HiCache's backup and kvtier's write-behind have brought so many blocks to the disk."""
    deadline = time.monotonic() + 60
    while engine.metric("kvtier_tier_stored_blocks_total", tier="g3", outcome="stored") < blocks:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_hicache_finds_its_pages_after_a_flush_and_a_restart(
    hicache: Any, prompt: Any, damage: Any, tmp_path: Path
) -> None:
    engine = hicache(tmp_path)
    expected = {}
    for seed in range(4):
        engine.host.generate(prompt(seed))
        (own,) = engine.host.generate(prompt(seed))
        assert own["storage"] == 0 < own["cached"]
        expected[seed] = own["tokens"]
    stored(engine, 4 * PROMPT_PAGES)
    engine.host.flush()
    (restored,) = engine.host.generate(prompt(0))
    assert (restored["cached"], restored["storage"]) == (PROMPT_PAGES * 16, PROMPT_PAGES * 16)
    assert restored["tokens"] == expected[0]
    engine.host.kill()
    engine = hicache(tmp_path)
    for seed in range(4):
        (restored,) = engine.host.generate(prompt(seed))
        assert restored["storage"] == PROMPT_PAGES * 16
        assert restored["tokens"] == expected[seed]
    engine.host.close()
    assert damage(tmp_path)
    engine = hicache(tmp_path)
    for seed in range(4):
        (computed,) = engine.host.generate(prompt(seed))
        assert computed["cached"] == 0
        assert computed["tokens"] == expected[seed]
    assert engine.metric("kvtier_tier_miss_blocks_total", tier="g3", reason="corrupt") > 0


def test_the_same_damage_shows_with_hicaches_own_files(hicache: Any, prompt: Any, tmp_path: Path) -> None:
    engine = hicache(tmp_path, "file")
    engine.host.generate(prompt(0))
    (own,) = engine.host.generate(prompt(0))
    deadline = time.monotonic() + 60
    while len(list(tmp_path.rglob("*.bin"))) < PROMPT_PAGES:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    engine.host.flush()
    for file in tmp_path.rglob("*.bin"):
        data = file.read_bytes()
        file.write_bytes(data[len(data) // 2 :] + data[: len(data) // 2])
    (served,) = engine.host.generate(prompt(0))
    assert served["storage"] == PROMPT_PAGES * 16
    assert served["tokens"] != own["tokens"]


def test_new_weights_under_hicache_never_meet_old_pages(
    hicache: Any, prompt: Any, model: Path, other_model: Path, tmp_path: Path
) -> None:
    engine = hicache(tmp_path)
    (old,) = engine.host.generate(prompt(1))
    stored(engine, PROMPT_PAGES)
    assert engine.host.ask(do="update", path=str(other_model))[0]
    engine.host.flush()
    (new,) = engine.host.generate(prompt(1))
    assert new["storage"] == 0
    assert new["tokens"] != old["tokens"]
    assert engine.host.ask(do="update", path=str(model))[0]
    engine.host.flush()
    (back,) = engine.host.generate(prompt(1))
    assert back["storage"] == 0
    assert back["tokens"] == old["tokens"]
