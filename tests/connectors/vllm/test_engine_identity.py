"""Blocks of a real engine are found under what it truly computes with, and under nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm.support.prompts import prompt

pytestmark = pytest.mark.timeout(600)
Start = Callable[..., Any]


def tiers(folder: Path) -> dict[str, Any]:
    g3 = {"path": str(folder / "g3"), "capacity": "256MiB"}
    return {"tiers": {"g2": {"capacity": "32MiB"}, "g3": g3}, "deadlines": {"lookup": "1s"}}


def tokens(outs: list[dict[str, Any]]) -> list[list[int]]:
    return [out["tokens"] for out in outs]


ASKED = [prompt(1), prompt(2)]


@dataclass(frozen=True)
class Run:
    plugin: bool = True
    restarts: bool = False  # then come engines that start with the new weights and with the old
    caching: bool = True  # the engine's own


@pytest.mark.parametrize(
    "run",
    [
        Run(),
        *(
            pytest.param(run, marks=pytest.mark.long)
            for run in (Run(restarts=True), Run(plugin=False), Run(caching=False))
        ),
    ],
    ids=str,
)
def test_weights_that_are_loaded_in_place_take_the_old_blocks_away(
    start: Start, make_checkpoint: Callable[[int], Path], tmp_path: Path, run: Run
) -> None:
    """vLLM tells nobody: the engine's own cache is reset, the connector's is not."""
    engine = start(config=tiers(tmp_path), plugin=run.plugin, engine={"enable_prefix_caching": run.caching})
    old = engine.generate(prompts=ASKED)
    named = engine.namespace()
    assert named["weights"].startswith("w1:" if run.plugin else "s1:")
    assert engine.reset()
    assert [out["read"] for out in engine.generate(prompts=ASKED)] == [{"g2": 288}] * 2, "the control"
    engine.reload(path=str(make_checkpoint(1)))
    assert engine.reset()
    new = engine.generate(prompts=ASKED)
    assert [out["read"] for out in new] == [{}, {}]
    right = engine.generate(prompts=ASKED, control={"load": False, "store": False})
    assert tokens(new) == tokens(right) != tokens(old)
    assert engine.settled() and engine.namespace() != named
    engine.generate(prompts=[prompt(3)])
    assert engine.reset()
    again = engine.generate(prompts=[prompt(3)])
    assert again[0]["read"] == {"g2": 288}, "what was stored since is the new weights'"
    engine.flush()
    assert engine.check()["storing"] == 0
    assert engine.stop() == 0
    if run.restarts:
        fresh = start(seed=1, config=tiers(tmp_path))
        found = fresh.generate(prompts=[*ASKED, prompt(3)])
        assert tokens(found) == [*tokens(new), again[0]["tokens"]]
        assert found[2]["read"] == {"g3": 288}, "an engine that starts with them shares"
        assert fresh.stop() == 0
        first = start(config=tiers(tmp_path))
        found = first.generate(prompts=[*ASKED, prompt(3)])
        assert tokens(found)[:2] == tokens(old) and found[2]["read"] == {}
        assert first.stop() == 0


@pytest.mark.long  # test_identity.py shows quickly that the name is another
def test_another_configuration_of_the_same_weights_misses(
    start: Start, make_checkpoint: Callable[[int], Path], tmp_path: Path
) -> None:
    first = start(config=tiers(tmp_path))
    old = first.generate(prompts=ASKED)
    assert first.stop() == 0
    changed = json.loads((make_checkpoint(0) / "config.json").read_text()) | {"rms_norm_eps": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    second = start(config=tiers(tmp_path), engine={"hf_config_path": str(tmp_path)})
    new = second.generate(prompts=ASKED)
    assert [out["read"] for out in new] == [{}, {}]
    assert tokens(new) == tokens(second.generate(prompts=ASKED, control={"load": False})) != tokens(old)
    assert second.stop() == 0


@pytest.mark.long  # test_parts.py shows quickly that the name is another
@pytest.mark.parametrize("caching", [True, False])
def test_an_adapter_is_what_the_worker_loaded(
    start: Start, write_adapter: Callable[[Path, int], Path], tmp_path: Path, caching: bool
) -> None:
    """Its files are overwritten between the engine's loading and its first request."""
    path = tmp_path / "adapter"
    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 4, "enable_prefix_caching": caching}
    engine = start(config=tiers(tmp_path), engine=lora)
    assert engine.load_adapter(adapter=["tuned", 1, str(write_adapter(path, 1))])
    write_adapter(path, 2)
    old = engine.generate(prompts=ASKED, adapter=["tuned", 1, str(path)])
    engine.generate(prompts=[prompt(3)], adapter=["tuned", 1, str(path)])
    engine.flush()
    assert engine.check()["storing"] == 0
    assert engine.stop() == 0
    second = start(config=tiers(tmp_path), engine=lora)
    new = second.generate(prompts=ASKED, adapter=["tuned", 1, str(path)])
    assert [out["read"] for out in new] == [{}, {}]
    right = second.generate(prompts=ASKED, adapter=["tuned", 1, str(path)], control={"load": False})
    assert tokens(new) == tokens(right) != tokens(old)
    assert second.reset()
    warm = second.generate(prompts=ASKED, adapter=["tuned", 1, str(path)])
    assert [out["read"] for out in warm] == [{"g2": 288}] * 2 and tokens(warm) == tokens(new)
    assert second.stop() == 0


def test_two_words_of_configuration_suffice(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plug-in names the connector, the environment its file; a failed load is computed; one line says what runs."""
    (tmp_path / "kvtier.yaml").write_text(json.dumps({"version": 1, **tiers(tmp_path), "deadlines": {"lookup": "30s"}}))
    monkeypatch.setenv("KVTIER_CONFIG", str(tmp_path / "kvtier.yaml"))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    engine = start(engine={"kv_transfer_config": {"kv_connector": "KVTierConnector", "kv_role": "kv_both"}})
    cold = engine.generate(prompts=ASKED)
    assert engine.reset()
    engine.break_loads(how="fail", positions=[4])
    warm = engine.generate(prompts=ASKED)
    engine.mend()
    assert tokens(warm) == tokens(cold) and {out["finish"] for out in warm} == {"length"}
    (line,) = [line for line in engine.logs() if line.startswith("kvtier ")]
    name = engine.namespace_digest()[:16]
    assert "g2 32MiB" in line and "g3 256MiB (0 blocks warm)" in line and f"namespace {name}" in line
    assert engine.stop() == 0


@pytest.mark.parametrize(
    ("tier", "said"),
    [
        pytest.param({"g2": {"capasity": "1GiB"}}, "capasity", marks=pytest.mark.long),
        ({"g3": {"path": __file__, "capacity": "1GiB"}}, "tiers.g3.path .* is no directory"),
    ],
)
def test_a_mistake_is_found_before_the_weights_are_loaded(start: Start, tier: dict[str, Any], said: str) -> None:
    with pytest.raises(AssertionError, match=said) as failure:
        start(config={"tiers": tier})
    assert "init_device" in str(failure.value)
