"""What the vLLM connector costs an engine that gets no hits from it: the share of step time spent inside its calls.

    python benchmarks/vllm_overhead.py --model DIR --out benchmarks/results/vllm_overhead.json

Scheduler and worker share this process. Every prompt is new, so nothing is ever found and everything is stored: the
worst case. Timed inside one run, calls against the steps around them, because two runs on a shared machine differ by
more than what is measured; also the p99 of the share per step. Copies are made on the engine's thread here (a GPU makes
them beside it), so `copy` is listed by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

SCHEDULER = ("arrive", "match", "allocated", "plan", "completed", "finish", "pending", "news")
COPY = ("load", "store", "poll", "answer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--prompt-tokens", type=int, default=500)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
    os.environ.update(OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    result = measure(args)
    text = json.dumps(result, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    config = {"tiers": {"g2": {"capacity": "256MiB"}}, "offload": {"dirty_max_age": "100ms"}}
    llm = LLM(
        model=args.model, skip_tokenizer_init=True, dtype="float32", seed=0, max_model_len=2048, block_size=32,
        num_gpu_blocks_override=512, gpu_memory_utilization=0.2, enforce_eager=True, max_num_batched_tokens=1024,
        async_scheduling=False, distributed_executor_backend="uni",
        kv_transfer_config={
            "kv_connector": "KVTierConnector", "kv_connector_module_path": "kvtier.connectors.vllm",
            "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kvtier_config": config},
        },
    )  # fmt: skip
    core = llm.llm_engine.engine_core.engine_core
    half, worker = core.scheduler.connector._scheduler, get_kv_transfer_group()._worker
    spent = {"scheduler": 0.0, "copy": 0.0}

    def timed(owner: Any, name: str, kind: str) -> None:
        plain = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return plain(*arguments)
            finally:
                spent[kind] += time.perf_counter() - began

        setattr(owner, name, call)

    for name in SCHEDULER:
        timed(half, name, "scheduler")
    for name in COPY:
        timed(worker, name, "copy")
    steps: list[tuple[float, float, float]] = []
    plain_step = core.step_fn

    def step() -> Any:
        before, began = dict(spent), time.perf_counter()
        out = plain_step()
        steps.append((time.perf_counter() - began, *(spent[kind] - before[kind] for kind in ("scheduler", "copy"))))
        return out

    core.step_fn = step
    core.step = step
    dice = random.Random(0)
    prompts = [
        {"prompt_token_ids": [dice.randrange(3, 1000) for _ in range(args.prompt_tokens)]} for _ in range(args.prompts)
    ]
    sampling = SamplingParams(temperature=0, max_tokens=args.output_tokens, ignore_eos=True, detokenize=False)
    llm.generate(prompts[:4], sampling, use_tqdm=False)
    steps.clear()
    outs = llm.generate(prompts[4:], sampling, use_tqdm=False)
    assert all(out.num_cached_tokens == 0 for out in outs)
    total = sum(step[0] for step in steps)
    core.shutdown()
    return {
        "what": "share of step time inside the connector's calls at 0 % hits, everything stored",
        "steps": len(steps),
        "step_ms_median": 1e3 * statistics.median(step[0] for step in steps),
        "scheduler_share": sum(step[1] for step in steps) / total,
        "copy_share": sum(step[2] for step in steps) / total,
        "blocks_stored": half.counters["blocks_stored"],
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()},
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip(),
        "command": f"python benchmarks/vllm_overhead.py --model {Path(args.model).name} --prompts {args.prompts}",
    }


if __name__ == "__main__":
    main()
