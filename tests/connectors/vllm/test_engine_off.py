"""Prefix caching off: because vLLM must, then kvtier does nothing; because its user said so, then kvtier is the cache.

And clients that go away at every stage of a request, with prefix caching on and off.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm.support.prompts import IDLE, prompt, tiers, tokens
from tests.connectors.vllm.support.storms import storm

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

Start = Callable[..., Any]


def test_a_model_whose_prompts_attend_to_later_tokens_is_not_cached(
    start: Start, prefix_lm: Any, tmp_path: Path
) -> None:
    """A prompt's KV depends on all of it, so a shared prefix has other KV in each prompt."""
    options, prompts, right = prefix_lm
    engine = start(config=tiers(tmp_path), **options)
    assert not engine.has_cache() and any("attend to later ones" in line for line in engine.logs())
    for _ in range(2):
        outs = [engine.generate(prompts=[p], settle=False)[0] for p in prompts]
        assert tokens(outs) == right and all(out["read"] == {} for out in outs)
    assert engine.stop() == 0 and not (tmp_path / "g3").exists()


def tokenizer(folder: Path) -> str:
    """A tokenizer of numbers: vLLM does not pool without one."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({str(number): number for number in range(1024)}, unk_token="0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="0").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("pooling", ["MEAN", "LAST"])
def test_the_same_text_is_embedded_twice(start: Start, tmp_path: Path, pooling: str) -> None:
    """The mean over all tokens needs all of them computed: vLLM turns prefix caching off for it."""
    options: dict[str, Any] = {"runner": "pooling", "convert": "embed", "pooler_config": {"seq_pooling_type": pooling}}
    options.update(max_num_batched_tokens=2048, skip_tokenizer_init=False, tokenizer=tokenizer(tmp_path / "tokens"))
    engine = start(config=tiers(tmp_path), engine=options)
    first = engine.embed(prompts=[prompt(1), prompt(2)])
    engine.settle()
    assert engine.reset()
    assert engine.embed(prompts=[prompt(1), prompt(2)]) == first
    assert engine.has_cache() == (pooling == "LAST")
    assert engine.stop() == 0


@pytest.mark.parametrize("caching", [True, False])
def test_a_streaming_session(start: Start, tmp_path: Path, caching: bool) -> None:
    """Each answer's last token completes a block and is dropped: the block gets another name."""
    engine = start(config=tiers(tmp_path), engine={"enable_prefix_caching": caching})
    parts = [prompt(1, 95), prompt(2, 32), prompt(3, 40), prompt(4, 70)]
    seen = engine.session(name="session", parts=parts, tokens=1)
    assert [len(one) for one in seen] == [96, 128, 168, 238]
    assert engine.check() == IDLE
    assert engine.resident(prompt=seen[-1])[0] == (len(seen[-1]) - 1) // 32
    asked = [[*one, *prompt(9, 40)] for one in seen]
    right = tokens([engine.generate(prompts=[p], control={"load": False, "store": False})[0] for p in asked])
    assert engine.reset()
    warm = [engine.generate(prompts=[p])[0] for p in asked]
    assert tokens(warm) == right and any(out["read"] for out in warm)
    assert engine.check() == IDLE
    assert engine.stop() == 0


@pytest.mark.parametrize(("caching", "drafter"), [(True, 1), (False, 1), (True, 0)])
def test_async_scheduling_with_speculation_stores_as_much_as_without(
    start: Start, make_checkpoint: Callable[[int], Path], tmp_path: Path, caching: bool, drafter: int
) -> None:
    """Steps are planned as if all drafts of the last one were right. Those of another model hardly ever are, those of
    the model itself always."""
    speculation = {"method": "draft_model", "model": str(make_checkpoint(drafter)), "num_speculative_tokens": 3}
    stored = {}
    for mode in (False, True):
        folder = tmp_path / str(mode)
        folder.mkdir()
        engine = start(
            config=tiers(folder),
            engine={"async_scheduling": mode, "speculative_config": speculation, "enable_prefix_caching": caching},
            insist=mode,
        )
        assert engine.is_async() == mode
        out = engine.generate(prompts=[prompt(1, 60)], tokens=400)[0]
        whole = [*prompt(1, 60), *out["tokens"]]
        stored[mode] = engine.resident(prompt=whole)[0]
        assert engine.check() == IDLE
        again = engine.generate(prompts=[[*whole, 5]], control={"load": False, "store": False})[0]["tokens"]
        assert engine.reset()
        warm = engine.generate(prompts=[[*whole, 5]])[0]
        assert warm["tokens"] == again and warm["read"]
        assert engine.stop() == 0
    assert stored == {False: 14, True: 14}


@pytest.mark.parametrize("caching", [True, False])
def test_a_drafters_kv_comes_back_with_the_models(
    start: Start, make_checkpoint: Callable[[int], Path], tmp_path: Path, caching: bool
) -> None:
    """The model drafts for itself, so all drafts are right that know the prompt. The control: those that do not."""
    speculation = {"method": "draft_model", "model": str(make_checkpoint(0)), "num_speculative_tokens": 3}
    engine = start(config=tiers(tmp_path), engine={"speculative_config": speculation, "enable_prefix_caching": caching})

    def share(read: dict[str, int]) -> tuple[float, list[int]]:
        """Of drafts that are accepted; and the tokens."""
        kinds = ("vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_draft_tokens")
        before = engine.sources()
        out = engine.generate(prompts=[prompt(1, 400)], tokens=60)[0]
        accepted, drafted = (engine.sources()[kind] - before.get(kind, 0) for kind in kinds)
        assert out["read"] == read and engine.reset()
        return accepted / drafted, out["tokens"]

    cold, right = share({})
    assert cold == 1 and share({"g2": 384}) == (1, right)
    engine.break_loads(how="zeros", layers="draft")
    assert share({"g2": 384}) == (0, right), "what a drafter does not know costs drafts, and no token"
    engine.mend()
    assert engine.check() == IDLE
    assert engine.stop() == 0


@pytest.mark.parametrize("mode", ["eager", "auto"])
@pytest.mark.parametrize("caching", [True, False])
def test_clients_that_go_away_at_every_stage(start: Start, tmp_path: Path, caching: bool, mode: str) -> None:
    """None of the others gets a wrong token, no block or slot leaks, and the engine goes on."""
    engine = start(config={**tiers(tmp_path), "offload": {"mode": mode}}, engine={"enable_prefix_caching": caching})
    chance = random.Random(f"{caching} {mode}")
    asked = [prompt(1 + i // 2, 200) + prompt(50 + i, 100) for i in range(6)]
    right = [engine.generate(prompts=[p], control={"load": False})[0]["tokens"] for p in asked]
    storm(engine, asked, right, chance, turns=120)
    assert engine.reset()
    warm = [engine.generate(prompts=[p])[0] for p in asked]
    assert tokens(warm) == right and all(out["read"] for out in warm)
    assert engine.counters()["tokens_read_g2"] > 0 and engine.counters()["load_failures"] > 0
    assert engine.check() == IDLE
    assert engine.stop() == 0
