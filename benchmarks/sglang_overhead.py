"""Cost of kvtier to an SGLang engine that gets no hits from it: pairs of requests, with and without, in one run.

    .venv-sglang/bin/python benchmarks/sglang_overhead.py --save benchmarks/results

Two engines, one over kvtier (RAM and disk) and one over nothing, get the same prompts in turn, one at a time, the
one first that was second before; every prompt is new, so nothing is ever found and everything is stored: the worst
case. Ratios within pairs, since two runs on a shared machine differ by more than what is measured. Copies are made on
the scheduler's thread here; a GPU makes them beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PAGE, WARM_UP = 16, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--save", type=Path, help="directory for the result")
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    folder = Path(tempfile.mkdtemp(prefix="kvtier-overhead-"))
    try:
        results = measure(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    entry = {
        "what": "time of a request over kvtier, against the same without, at 0 % hits with everything stored",
        "results": results,
        "machine": {"cpus": os.cpu_count(), "load_before": load_before, "python": platform.python_version()},
        "commit": head.stdout.strip(),
        "command": f"python benchmarks/sglang_overhead.py --pairs {args.pairs}",
    }
    text = json.dumps(entry, indent=2)
    print(text)
    if args.save:
        (args.save / "sglang_overhead.json").write_text(text + "\n")


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from tests.connectors.sglang.support.engine_process import EngineHost

    make_model(folder / "model", args.layers, args.hidden)
    (folder / "g3").mkdir()
    common = {"model_path": str(folder / "model"), "max_total_tokens": 8192, "page_size": PAGE}
    tiers = {"g2": {"capacity": "256MiB"}, "g3": {"path": str(folder / "g3"), "capacity": "4GiB"}}
    linker = {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": {
            "linker": "KVTierLinker",
            "linker_module_path": "kvtier.connectors.sglang",
            "linker_extra_config": {"kvtier_config": {"version": 1, "tiers": tiers}},
        },
    }
    engines = {}
    try:
        engines["without"] = EngineHost(common)
        engines["with"] = EngineHost({**common, **linker})
        return {
            "prefill": pairs(args, engines, new=1, seed=0),
            "prefill_and_decode": pairs(args, engines, new=args.output_tokens, seed=1 << 30),
            "block_bytes": args.layers * 2 * PAGE * max(1, args.hidden // 256) * 64 * 4,
        }
    finally:
        for engine in engines.values():
            engine.close()


def pairs(args: argparse.Namespace, engines: dict[str, Any], new: int, seed: int) -> dict[str, Any]:
    ratios: list[float] = []
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(args.pairs + WARM_UP):
        first = seed + turn * 100_003
        prompt = [((first + i) * 7919 + (first >> 3) * 31) % 1000 + 3 for i in range(args.prompt_tokens)]
        took = {}
        for name in list(engines) if turn % 2 else reversed(engines):
            (answer,) = engines[name].generate(prompt, new=new, logprobs=False)
            assert answer["cached"] == 0, "every prompt is new"
            took[name] = answer["seconds"]
        if turn >= WARM_UP:
            ratios.append(took["with"] / took["without"])
            for name, value in took.items():
                seconds[name].append(value)
    ratios.sort()
    return {
        "prompt_tokens": args.prompt_tokens,
        "output_tokens": new,
        "pairs": args.pairs,
        "without_ms_median": 1e3 * statistics.median(seconds["without"]),
        "with_ms_median": 1e3 * statistics.median(seconds["with"]),
        "ratio_median": statistics.median(ratios),
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
    }


def make_model(folder: Path, layers: int, hidden: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=max(1, hidden // 256), head_dim=64,
        max_position_embeddings=8192, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).float().eval().save_pretrained(folder)


if __name__ == "__main__":
    main()
