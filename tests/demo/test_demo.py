"""`kvtier demo`: all four tiers serve, a second process finds the store, and each comparison can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.demo.job import TIERS, Job, Turn
from kvtier.demo.stage import Act
from kvtier.testing import verification_off

pytest.importorskip("torch")
pytest.importorskip("transformers")

SERVED = {*TIERS, "recomputed"}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The whole demo, once, as a user runs it."""
    command = [sys.executable, "-m", "kvtier", "demo", "--json", "--folder", str(tmp_path_factory.mktemp("demo"))]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONSAFEPATH": "1"}
    )
    assert done.returncode == 0, done.stderr
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


@pytest.mark.timeout(700)
class TestWholeDemo:
    def test_one_object_with_the_promised_keys(self, outcome: dict[str, Any]) -> None:
        for part in (outcome, outcome["second_process"]):
            assert part["tokens_identical"] is True and part["bytes_identical"] is True
            assert set(part["served_tokens"]) == SERVED
            assert part["ttft_ms"]["hit"] > 0 and part["ttft_ms"]["recompute"] > 0

    def test_all_four_tiers_serve_tokens(self, outcome: dict[str, Any]) -> None:
        assert all(outcome["served_tokens"][tier] > 0 for tier in TIERS)

    def test_the_second_process_computes_next_to_nothing(self, outcome: dict[str, Any]) -> None:
        served = outcome["second_process"]["served_tokens"]
        assert served["g3"] > 0 and served["g4"] > 0
        assert served["recomputed"] < sum(served.values()) / 10

    def test_a_hit_is_faster_than_computing(self, outcome: dict[str, Any]) -> None:
        for part in (outcome, outcome["second_process"]):
            assert part["ttft_ms"]["hit"] < part["ttft_ms"]["recompute"]

    def test_every_token_is_accounted_for(self, outcome: dict[str, Any]) -> None:
        for turn in outcome["turns"]:
            assert sum(turn["served"].values()) == turn["prompt_tokens"]
        assert len(outcome["turns"]) == 20


def played(folder: Path, before_second: Callable[[Any], None]) -> list[Turn]:
    """Two turns of one conversation; `before_second` may spoil what the first one stored."""
    from kvtier.demo.run import play

    turns: list[Turn] = []

    def tamper(prefixes: Any) -> None:
        if turns:
            before_second(prefixes)

    play(Job(str(folder), f"file://{folder}/g4", conversations=1, turns=2, new_tokens=8), turns.append, tamper)
    return turns


def spoil(folder: Path) -> Callable[[Any], None]:
    """Leave the blocks in G3 alone, with every page of the slab damaged behind the tier's back."""

    def work(prefixes: Any) -> None:
        prefixes.pool.evict()
        for tier in ("g2", "g4"):
            prefixes.cache.evict(tier)
        slabs = [path for path in (folder / "g3").rglob("*") if path.is_file() and "slab" in str(path)]
        assert slabs
        for path in slabs:
            with path.open("r+b") as file:
                for start in range(0, path.stat().st_size, 4096):
                    file.seek(start + 2048)
                    file.write(b"\x3f" * 64)

    return work


def hybrid_model(folder: Path, kind: str) -> Path:
    """A checkpoint of a small random model with windows or states, which reads bytes."""
    import torch

    from tests.connectors.transformers.support.models import gemma3, qwen3_next
    from tests.demo.support.tokenizers import byte_tokenizer

    tokenizer = byte_tokenizer()
    model = {"window": gemma3, "state": qwen3_next}[kind](vocab_size=len(tokenizer))
    model.to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["window", pytest.param("state", marks=pytest.mark.long)])
class TestHybrids:
    """A model of several KV groups: all of them restored from below in another process, and compared."""

    def job(self, folder: Path, kind: str) -> Job:
        model = str(hybrid_model(folder / "model", kind))
        return Job(str(folder), f"file://{folder}/g4", model=model, conversations=1, turns=2, new_tokens=20)

    def test_bytes_and_tokens_are_the_same(self, tmp_path: Path, kind: str) -> None:
        from kvtier.demo.run import play

        turns: list[Turn] = []
        job = self.job(tmp_path, kind)
        play(job, turns.append, lambda prefixes: prefixes.pool.evict())
        end = play(replace(job, resume=True), turns.append)
        assert [turn.blocks_restored > 0 for turn in turns] == [False, True, True]
        assert all(turn.bytes_same and turn.tokens_same and turn.gap < 0.01 for turn in turns)
        assert len(end["groups"]) == 2 and all(tiers.get("g3", 0) for tiers in end["groups"].values())

    @pytest.mark.long
    def test_damage_in_windows_and_states_alone_is_seen(self, tmp_path: Path, kind: str) -> None:
        """Control. (The tokens may be the same: it fades while the rest of the prompt is computed.)"""
        from kvtier.connectors.transformers.groups import LayerGroups
        from kvtier.demo.run import play

        turns: list[Turn] = []
        restore = LayerGroups.restore

        def damaged(self: Any, cache: Any, boundary: int, blocks: Any) -> None:
            restore(self, cache, boundary, blocks.roll(64, dims=1))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LayerGroups, "restore", damaged)
            play(self.job(tmp_path, kind), turns.append)
        assert turns[1].blocks_restored > 0 and not turns[1].bytes_same


class TestControls:
    def test_damage_that_is_not_verified_fails_every_comparison(self, tmp_path: Path) -> None:
        with verification_off():
            _, turn = played(tmp_path, spoil(tmp_path))
        assert turn.blocks_restored > 0 and turn.served["g3"] > 0
        assert not turn.bytes_same and not turn.tokens_same and turn.gap > 0.01

    def test_damage_that_is_verified_is_recomputed(self, tmp_path: Path) -> None:
        _, turn = played(tmp_path, spoil(tmp_path))
        assert turn.blocks_restored == 0 and turn.served["recomputed"] == turn.prompt_tokens
        assert turn.tokens_same and turn.gap < 0.01

    def test_without_damage_both_hold(self, tmp_path: Path) -> None:
        with verification_off():
            _, turn = played(tmp_path, lambda prefixes: prefixes.pool.evict())
        assert turn.blocks_restored > 0 and turn.bytes_same and turn.tokens_same and turn.gap < 0.01


def report(**changes: Any) -> dict[str, Any]:
    good = {"blocks_restored": 3, "bytes_same": True, "tokens_same": True, "gap": 0.0, "ttft_hit_ms": 1.0,
            "ttft_recompute_ms": 2.0}  # fmt: skip
    return {**good, **changes}


END = {"gap": 0.01, "served": dict.fromkeys(SERVED, 0)}


class TestSummary:
    def test_one_bad_turn_spoils_it(self) -> None:
        assert Act([report(), report(gap=0.001)], END).tokens_identical
        assert not Act([report(), report(gap=0.02)], END).tokens_identical
        assert not Act([report(), report(tokens_same=False)], END).tokens_identical
        assert Act([report(), report()], END).bytes_identical
        assert not Act([report(), report(bytes_same=False)], END).bytes_identical

    def test_nothing_restored_proves_nothing(self) -> None:
        act = Act([report(blocks_restored=0)], END)
        assert not act.bytes_identical and act.summary()["ttft_ms"] == {"hit": None, "recompute": None}
        assert not Act([], END).tokens_identical
