"""vLLM with kvtier from end to end, with CUDA graphs. A part of `make gpu-check`, where vLLM is installed.

A random Llama, read from a checkpoint as any other, in vLLM's own engine process. Each conversation is asked three
times, one after another: computed, from the engine's own cache, and, after the engine forgot its blocks, from G2. The
second and third end at the same boundary, so that their tokens must be equal. The blocks of all conversations are more
than the engine's pool holds: they leave it while others are computed.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu.rows import Rows, Skip

BLOCK_TOKENS = 32  # what both of vLLM's attention for GPUs and for CPUs take
ANSWER_TOKENS = 16
LLAMA_1B = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 32768,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
"""CUDA graphs without the minutes of compiling."""


def measure(device: str, rows: Rows, *, tiny: bool) -> None:
    with tempfile.TemporaryDirectory(dir=rows.folder) as folder:
        bench = Bench(device, Path(folder), tiny=tiny)
        rows.run("vLLM, conversations that left the pool", bench.conversations)


class Bench:
    def __init__(self, device: str, folder: Path, *, tiny: bool) -> None:
        self._device, self._folder, self._tiny = device, folder, tiny
        self._tokens, self._count = (192, 6) if tiny else (16384, 8)

    def conversations(self) -> Mapping[str, Any]:
        llm, sampling = self._engine()
        try:
            return self._measured(llm, sampling)
        finally:  # else this process waits at its end for the engine's
            llm.llm_engine.engine_core.shutdown()

    def _measured(self, llm: Any, sampling: Any) -> Mapping[str, Any]:
        self._ask(llm, [7] * (4 * BLOCK_TOKENS), sampling, 0)  # warms up
        prompts = [self._prompt(number) for number in range(self._count)]
        figures: dict[str, list[float]] = {"computed": [], "own": [], "g2": []}
        answers = []
        for prompt in prompts:
            figures["computed"].append(self._ask(llm, prompt, sampling, 0)[1])
            answer, seconds = self._ask(llm, prompt, sampling, self._tokens)
            figures["own"].append(seconds)
            answers.append(answer)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert llm.reset_prefix_cache(), "the engine would not forget its blocks"
            again, seconds = self._ask(llm, prompt, sampling, self._tokens)
            assert again == answer, f"other tokens from G2: {again}, not {answer}"
            figures["g2"].append(seconds)
        means = {f"{name}_s": statistics.median(values) for name, values in figures.items()}
        return {"tokens": self._tokens, **means, "g2_speedup": means["computed_s"] / means["g2_s"]}

    def _engine(self) -> tuple[Any, Any]:
        for name, value in {"HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0", "VLLM_LOGGING_LEVEL": "WARNING"}.items():
            os.environ.setdefault(name, value)
        try:
            from vllm import LLM, SamplingParams
        except ImportError as error:
            raise Skip(f"vLLM cannot be imported: {error}") from None
        block_bytes = self._model()
        blocks = self._count * (self._tokens // BLOCK_TOKENS)
        pool = blocks // 2 + self._tokens // BLOCK_TOKENS
        device: dict[str, Any] = (
            {"enforce_eager": True, "gpu_memory_utilization": 0.2}  # as is, vLLM wants 92 % of a host's memory free
            if self._device == "cpu"
            else {"compilation_config": GRAPHS, "seed": 0}
        )
        llm = LLM(
            model=str(self._folder / "model"),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=pool,
            max_model_len=self._tokens + BLOCK_TOKENS + ANSWER_TOKENS,
            max_num_seqs=4,
            enable_prefix_caching=True,
            disable_log_stats=False,
            kv_transfer_config={
                "kv_connector": "KVTierConnector",
                "kv_connector_module_path": "kvtier.connectors.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "kvtier_config": {"tiers": {"g2": {"capacity": 2 * blocks * block_bytes}}},
                    "recompute": "never",
                    "lookup_deadline": "10s",
                },
            },
            **device,
        )
        return llm, SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False)

    def _model(self) -> int:
        """Write the checkpoint; the bytes of one block."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            **(TINY if self._tiny else LLAMA_1B), max_position_embeddings=1 << 17, initializer_range=0.15,
            tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device(self._device):
            model = LlamaForCausalLM(config).to(torch.bfloat16)
        model.save_pretrained(self._folder / "model")
        del model
        if self._device != "cpu":
            torch.cuda.empty_cache()
        return int(4 * BLOCK_TOKENS * config.num_hidden_layers * config.num_key_value_heads * config.head_dim)

    def _prompt(self, number: int) -> list[int]:
        """Tokens of its own from the first block on: conversations share nothing."""
        vocabulary = int((TINY if self._tiny else LLAMA_1B)["vocab_size"]) - 8
        return [8 + (number * 7919 + position * position * 31) % vocabulary for position in range(self._tokens + 1)]

    def _ask(self, llm: Any, prompt: list[int], sampling: Any, cached: int) -> tuple[list[int], float]:
        """The answer and the seconds to its first token; `cached` tokens of the prompt must not have been computed."""
        (out,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        found = int(out.num_cached_tokens or 0)
        assert found == cached, f"{found} of {len(prompt)} tokens were found, not {cached}"
        return list(out.outputs[0].token_ids), float(out.metrics.first_token_latency)
