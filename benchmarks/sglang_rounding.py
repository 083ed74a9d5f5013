"""Compares answers over SGLang's tree and over kvtier with those of an engine without any cache, and how much floats
that are added up in other batches move them.

    .venv-sglang/bin/python benchmarks/sglang_rounding.py --save benchmarks/results

The packaged conversations, one request at a time, greedy, with the log-probabilities of the two best tokens of every
step. Four engines: without a cache; without one, its prompts cut into other pieces; with SGLang's tree; with kvtier
below that, every block that comes back compared bit for bit with what was computed.
"""

from __future__ import annotations

import argparse
import json
import platform
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvtier.bench.peers.vllm import BLOCK_BYTES, BLOCK_TOKENS, PROMPT_BLOCKS_MAX, make_model, prompts_of, sample

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TOKENS = 8
POOL_BLOCKS, HOST_BLOCKS = 160, 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--save", type=Path, help="directory for the result")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtier-rounding-") as folder:
        results = measure(args.requests, Path(folder))
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    entry = {
        "what": "answers of SGLang engines against those of one without any cache; log-probabilities",
        "results": results,
        "machine": {"python": platform.python_version(), "processor": platform.machine()},
        "commit": head.stdout.strip(),
        "command": f"python benchmarks/sglang_rounding.py --requests {args.requests}",
    }
    text = json.dumps(entry, indent=2)
    print(text)
    if args.save:
        (args.save / "sglang_rounding.json").write_text(text + "\n")


def measure(requests: int, folder: Path) -> dict[str, Any]:
    prompts = prompts_of(sample()[:requests])
    common = {
        "model_path": str(make_model(folder / "model")), "page_size": BLOCK_TOKENS, "random_seed": 0,
        "max_total_tokens": POOL_BLOCKS * BLOCK_TOKENS, "context_length": BLOCK_TOKENS * (PROMPT_BLOCKS_MAX + 4),
        "chunked_prefill_size": 512,
    }  # fmt: skip
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        control = int(probe.getsockname()[1])
    truth, _ = replay(prompts, {**common, "disable_radix_cache": True})
    out: dict[str, Any] = {
        "requests": len(prompts),
        "tokens": sum(len(answer["tokens"]) for answer in truth),
        "smallest_gap_of_two_best": min(gap for answer in truth for gap in answer["gaps"]),
    }
    variants = {
        "other_pieces": {"disable_radix_cache": True, "chunked_prefill_size": 2048},
        "tree": {},
        "kvtier": linker(folder, control),
    }
    for name, more in variants.items():
        answers, witness = replay(prompts, {**common, **more}, control if name == "kvtier" else None)
        out[name] = compared(answers, truth) | witness
    return out


def linker(folder: Path, control: int) -> dict[str, Any]:
    (folder / "g3").mkdir()
    tiers = {"g2": {"capacity": HOST_BLOCKS * BLOCK_BYTES}, "g3": {"path": str(folder / "g3"), "capacity": "4GiB"}}
    extra = {
        "kvtier_config": {"version": 1, "tiers": tiers}, "recompute": "never", "control": control,
        "witness": str(folder / "witness"),
    }  # fmt: skip
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": {
            "linker": "TrialLinker", "linker_module_path": "trial_linker", "linker_extra_config": extra,
        },
    }  # fmt: skip


def replay(
    prompts: list[list[int]], arguments: dict[str, Any], control: int | None = None
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Every prompt's answer, and what the linker's witness saw."""
    from tests.connectors.sglang.support.engine_process import EngineHost

    engine = EngineHost(arguments)
    try:
        answers = [engine.generate(prompt, new=TOKENS)[0] for prompt in prompts]
        if control is None:
            return answers, {}
        with socket.create_connection(("127.0.0.1", control), timeout=60) as line:
            line.sendall(b'{"do": "witness"}\n')
            return answers, json.loads(line.makefile().readline())
    finally:
        engine.close()


def compared(answers: list[dict[str, Any]], truth: list[dict[str, Any]]) -> dict[str, Any]:
    differing, moved = [], 0.0
    for number, (answer, expected) in enumerate(zip(answers, truth, strict=True)):
        for step, (token, right) in enumerate(zip(answer["tokens"], expected["tokens"], strict=True)):
            if token != right:
                gaps = {"gap": answer["gaps"][step], "gap_without_cache": expected["gaps"][step]}
                differing.append({"request": number, "step": step, **gaps})
                break
            moved = max(moved, abs(answer["logprobs"][step] - expected["logprobs"][step]))
    return {
        "cached_tokens": sum(answer["cached"] for answer in answers),
        "answers_that_differ": differing,
        "largest_difference_of_equal_tokens": moved,
    }


if __name__ == "__main__":
    main()
