"""Cost of kvtier's KV events for routers to a vLLM engine whose prompts are all new, beside vLLM's own events.

    python benchmarks/vllm_events.py --save benchmarks/results

One engine publishes its own events throughout. kvtier's are switched on and off between its requests, in the order
on-off-off-on, and each request's processor time is that of the whole process, with the publisher's thread, until all
its blocks are stored. Two neighbours of one engine share its memory and its moment, so their difference says more than
two runs do. `cost`: the median of the differences, as a share of the time without; `low` and `high` bound that median
with 95 % confidence, whatever the distribution. `share`: of the steps' time in kvtier's part on the engine's thread.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_overhead import MODELS, OUTPUT_TOKENS, STORED_TOKENS, engine, parts

WARM_UP = 4
IDLE_S = 5.0
"""At most, for what a request leaves to be stored."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="only this one")
    parser.add_argument("--pairs", type=int, default=80)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
    os.environ.update(OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    from kvtier.bench.record import record, save

    results = {name: events(name, args.pairs) for name in ([args.model] if args.model else ["tiny", "small"])}
    entry = record("vllm_events", ["python", *sys.argv], results)
    print(json.dumps(entry, indent=2))
    if args.save:
        save(entry, args.save)


def events(name: str, pairs: int) -> dict[str, Any]:
    """Figures of one model."""
    with engine(name, {"g2": {"capacity": "512MiB"}}, 1024, publishes=("g2", "g3"), mode="eager") as llm:
        run = Run(llm)
        for _ in range(WARM_UP):
            run.request(told=True)
        run.told_s = run.stepped_s = 0.0
        found: list[tuple[float, float]] = []  # with kvtier's events, and without
        for place in range(pairs):
            first = place % 2 == 0
            one, other = run.request(told=first), run.request(told=not first)
            found.append((one, other) if first else (other, one))
        share, published = run.told_s / run.stepped_s, run.published
    return {
        "pairs": pairs,
        "events_per_request": published / (pairs + WARM_UP),
        "cpu_s": statistics.median(without for _, without in found),
        "share": 2 * share,  # half of the requests had none
        **median_of([told / without - 1 for told, without in found]),
    }


def median_of(costs: Sequence[float]) -> dict[str, float]:
    """The median, and bounds of 95 % by order: of so many draws, that many lie below it by chance. Pure."""
    ordered, count = sorted(costs), len(costs)
    least, chance = 0, 0.0
    while least < count // 2 and (chance := chance + math.comb(count, least) / 2**count) <= 0.025:
        least += 1
    least = max(0, least - 1)
    return {"cost": statistics.median(ordered), "low": ordered[least], "high": ordered[count - 1 - least]}


class Run:
    """Requests to one engine, one after another, whose kvtier's events are switched. `told_s` and `stepped_s`: seconds
    in kvtier's part of its events, and in all steps; `published`: kvtier's events."""

    def __init__(self, llm: Any) -> None:
        from vllm import SamplingParams

        self._llm = llm
        self._core, self._half = parts(llm)
        self._events = self._half._events
        self._dice = random.Random(0)
        self._sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
        self.told_s = self.stepped_s = 0.0
        self.published = 0
        self._time(self._half, "take_events", "told_s")
        self._time(self._events, "remember", "told_s")
        self._core.step_fn = self._time(self._core, "step_fn", "stepped_s")

    def _time(self, owner: Any, call: str, total: str) -> Any:
        plain = getattr(owner, call)

        def measured(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                made = plain(*arguments, **named)
            finally:
                setattr(self, total, getattr(self, total) + time.perf_counter() - began)
            self.published += len(made) if call == "take_events" else 0
            return made

        setattr(owner, call, measured)
        return measured

    def request(self, *, told: bool) -> float:
        """The process's processor time for one new prompt, its answer, and what it stores."""
        self._half._events = self._events if told else None
        self._half._caches.cache.manager.subscribe(self._events.events if told else None)
        prompt = {"prompt_token_ids": [self._dice.randrange(3, 1000) for _ in range(STORED_TOKENS)]}
        began = time.process_time()
        self._llm.generate([prompt], self._sampling, use_tqdm=False)
        connector, until = self._core.scheduler.connector, time.monotonic() + IDLE_S
        while connector.has_pending_push_work() and time.monotonic() < until:
            self._core.step_fn()
        time.sleep(0.02)  # for the publisher's thread; it takes no processor time
        return time.process_time() - began


if __name__ == "__main__":
    main()
