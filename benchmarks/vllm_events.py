"""Cost of KV events for routers to a vLLM engine whose prompts are all new.

    python benchmarks/vllm_events.py --save benchmarks/results

In `--rounds` rounds, by turns: engines that publish nothing (`off`), vLLM's own events (`engine`), and with them
those of kvtier's tiers (`tiers`). `share`: of the steps' time in kvtier's part, on the engine's thread. `cpu_s`:
processor time of the whole process per prompt, the publisher's thread included; `cost` is by how much that of `tiers`
is above that of `engine`, the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_overhead import MODELS, OUTPUT_TOKENS, STORED_TOKENS, engine, parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
    os.environ.update(OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    from kvtier.bench.record import record, save

    entry = record("vllm_events", ["python", *sys.argv], events(args.model, args.prompts, args.rounds))
    print(json.dumps(entry, indent=2))
    if args.save:
        save(entry, args.save)


def events(name: str, prompts: int, rounds: int) -> dict[str, Any]:
    kinds: dict[str, Sequence[str] | None] = {"off": None, "engine": (), "tiers": ("g2", "g3")}
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, publishes in kinds.items():
            found[kind].append(published(name, prompts, publishes))
    pairs = zip(found["tiers"], found["engine"], strict=True)
    return {
        **{kind: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for kind, rows in found.items()},
        "cost": statistics.median(ours["cpu_s"] / own["cpu_s"] - 1 for ours, own in pairs),
        "rounds": found,
    }


def published(name: str, prompts: int, publishes: Sequence[str] | None) -> dict[str, Any]:
    """One engine's share of step time in kvtier's events, and its processor time per prompt."""
    from vllm import SamplingParams

    spent, stepped = [0.0], [0.0]
    with engine(name, {"g2": {"capacity": "512MiB"}}, 1024, publishes=publishes) as llm:
        core, half = parts(llm)

        def timed(owner: Any, call: str, into: list[float]) -> Any:
            plain = getattr(owner, call)

            def measured(*arguments: Any, **named: Any) -> Any:
                began = time.perf_counter()
                try:
                    return plain(*arguments, **named)
                finally:
                    into[0] += time.perf_counter() - began

            setattr(owner, call, measured)
            return measured

        timed(half, "take_events", spent)
        if half._events is not None:
            timed(half._events, "remember", spent)
        core.step = timed(core, "step_fn", stepped)
        dice = random.Random(0)
        asked = [
            {"prompt_token_ids": [dice.randrange(3, 1000) for _ in range(STORED_TOKENS)]} for _ in range(prompts + 4)
        ]
        sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
        llm.generate(asked[:4], sampling, use_tqdm=False)
        spent[0] = stepped[0] = 0.0
        began = time.process_time()
        llm.generate(asked[4:], sampling, use_tqdm=False)
        return {"cpu_s": (time.process_time() - began) / prompts, "share": spent[0] / stepped[0]}


if __name__ == "__main__":
    main()
