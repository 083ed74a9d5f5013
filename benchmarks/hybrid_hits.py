"""Prompt tokens that hybrid models in vLLM do not compute again: with kvtier, with vLLM's own offloading, and with
memory for everything.

    python benchmarks/hybrid_hits.py --save benchmarks/results

An agent's conversations: three tasks of nine turns over one system prompt, with results of tools of many lengths. Every
prompt is the last one, its answer, and something new. A tiny Gemma 3 (windows beside full attention) and a tiny
Qwen3-Next (recurrent states beside full attention), random weights, blocks of 32 tokens, on a CPU. Each row is an
engine of its own:

    own 0, own None   vLLM's prefix cache with memory for all; `prefix_cache_retention_interval` as named
    kvtier, disk      before each prompt only what lies on the disk is left, as after a restart
    kvtier, host      before each prompt vLLM's own cache is reset, and host memory is left
    native, host      the same with vLLM's tiered offloading, whose copies a processor makes (`cpu_spec`)

`computed` are prompt tokens that the engine computed, `other_answers` prompts that were answered with other tokens than
by `own None`: an engine with states rounds them where a step ends, so there they depend on where a prompt was resumed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BLOCK = 32
ARMS = ("own None", "own 0", "kvtier, disk", "kvtier, host", "native, host")
_COMMON = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 4096, "initializer_range": 0.15,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "tie_word_embeddings": False,
        },
        {"dtype": "float32"},
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            "num_hidden_layers": 6, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
            "decoder_sparse_step": 1, "mlp_only_layers": [], "linear_num_value_heads": 2, "linear_num_key_heads": 1,
            "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
        },
        {"dtype": "bfloat16", "enable_prefix_caching": True},
    ),
}  # fmt: skip
"""By name: class of the configuration, its arguments, and options of the engine."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append", help="only these")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--arm", nargs=2, metavar=("ARM", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.arm:
        print(json.dumps(played(given.arm[0], Path(given.arm[1]), given.model[0])))
        return
    from kvtier.bench.record import record, save

    results = {model: compared(model) for model in given.model or MODELS}
    entry = record("hybrid_hits", ["python", *sys.argv], results)
    print(json.dumps(entry, indent=2))
    if given.save:
        save(entry, given.save)


def compared(model: str) -> dict[str, Any]:
    """Of each arm: tokens that were computed and found, and their share of what vLLM finds with memory for all."""
    with tempfile.TemporaryDirectory(prefix="kvtier-hybrid-") as name:
        folder = Path(name)
        make_model(model, folder / "model")
        rows = {}
        for arm in ARMS:
            command = [sys.executable, __file__, "--model", model, "--arm", arm, name]
            done = subprocess.run(command, text=True, stdout=subprocess.PIPE, check=True)
            rows[arm] = json.loads(done.stdout.splitlines()[-1])
    right = rows["own None"]["answers"]
    for row in rows.values():
        row["other_answers"] = sum(one != other for one, other in zip(row.pop("answers"), right, strict=True))
        for own in ("own 0", "own None"):
            row[f"share of {own}"] = round(row["found"] / rows[own]["found"], 4)
    return rows


def make_model(model: str, path: Path) -> None:
    import torch
    import transformers

    kind, shape, _ = MODELS[model]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**_COMMON, **shape)
    made = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in made.named_parameters():
        if name.endswith("A_log"):  # as made, a state forgets a token within the next one
            torch.nn.init.constant_(parameter, -6.0)
    made.save_pretrained(path)


def played(arm: str, folder: Path, model: str) -> dict[str, Any]:
    """The conversations on an engine in this process."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
    os.environ.update(OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    from vllm import LLM, SamplingParams

    own = arm.startswith("own")
    options: dict[str, Any] = {"num_gpu_blocks_override": 1500 if own else 128, **MODELS[model][2]}
    if own:
        options["prefix_cache_retention_interval"] = None if arm == "own None" else 0
    else:
        options["kv_transfer_config"] = native() if arm.startswith("native") else ours(arm, folder)
    llm = LLM(
        model=str(folder / "model"), skip_tokenizer_init=True, seed=0, max_model_len=2048, block_size=BLOCK,
        gpu_memory_utilization=0.2, enforce_eager=True, max_num_batched_tokens=512, async_scheduling=False,
        distributed_executor_backend="uni", **options,
    )  # fmt: skip
    core = llm.llm_engine.engine_core.engine_core
    connector = core.scheduler.connector
    found, asked, answers = [], [], []

    def ask(prompt: list[int]) -> list[int]:
        if connector is not None:
            settle(core, connector)
            if arm.endswith("disk"):
                connector._scheduler._caches.cache.flush(30)
                connector._scheduler._caches.cache.evict("g2")
            assert llm.reset_prefix_cache()
        sampling = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False)
        out = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
        asked.append(len(prompt))
        found.append(out.num_cached_tokens)
        answers.append(list(out.outputs[0].token_ids))
        return answers[-1]

    try:
        converse(ask)
    finally:
        core.shutdown()
    return {"prompt": sum(asked), "found": sum(found), "computed": sum(asked) - sum(found), "answers": answers}


def converse(ask: Callable[[list[int]], list[int]]) -> None:
    system = words(200, 290)
    for task in range(3):
        history = [*system, *words(201 + task, 45)]
        for turn in range(9):
            history = [*history, *ask(history), *words(210 + 10 * task + turn, 20 + 37 * (turn * turn % 5))]


def words(seed: int, length: int) -> list[int]:
    return [(i * 7919 + seed * 104729 + (i * seed) % 17) % 1000 + 3 for i in range(length)]


def settle(core: Any, connector: Any) -> None:
    """Step an idle engine until all is copied, as one in a process of its own does by itself."""
    until = time.monotonic() + 30
    while (connector.has_pending_push_work() or core.scheduler.has_requests()) and time.monotonic() < until:
        core.step_fn()


def ours(arm: str, folder: Path) -> dict[str, Any]:
    tiers: dict[str, Any] = {"g2": {"capacity": "64MiB"}}
    if arm.endswith("disk"):
        tiers["g3"] = {"path": str(folder / "g3"), "capacity": "1GiB"}
    extra = {
        "kvtier_config": {"tiers": tiers}, "model": "tiny", "lookup_deadline": "30s", "recompute": "never",
    }  # fmt: skip
    return {
        "kv_connector": "KVTierConnector", "kv_connector_module_path": "kvtier.connectors.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra,
    }  # fmt: skip


def native() -> dict[str, Any]:
    extra = {
        "spec_name": "CpuTieringSpec", "spec_module_path": "kvtier.connectors.vllm.offloading.cpu_spec",
        "cpu_bytes_to_use": 64 << 20, "secondary_tiers": [],
    }  # fmt: skip
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


if __name__ == "__main__":
    main()
