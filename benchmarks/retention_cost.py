"""CPU time of policies per reference, and the simulator's speed; writes benchmarks/results/retention_cost.json.

python benchmarks/retention_cost.py TRACE
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kvtier.bench.record import record, save
from kvtier.bench.retention.simulate import capacity_of, policy_cost, simulate
from kvtier.bench.retention.traces import load_trace
from kvtier.policies.gapduel import GapDuel
from kvtier.policies.lru import LRU


def main(path: str) -> None:
    trace = load_trace(path)
    results: dict[str, Any] = {"trace": trace.name, "references": trace.references}
    for fraction in (0.001, 0.01, 0.05):
        capacity = capacity_of(trace, fraction)
        for name, policy in (("lru", LRU(capacity)), ("gapduel", GapDuel(capacity))):
            cost = policy_cost(trace, policy, capacity)
            results[f"{name} at {100 * fraction:g} %"] = {
                "request_path_us_per_reference": round(cost.path_us, 3),
                "learning_us_per_reference": round(cost.train_us, 3),
            }
            print(name, fraction, results[f"{name} at {100 * fraction:g} %"], flush=True)
    for policy_name, fraction in (("lru", 0.05), ("lru", 0.01), ("gapduel", 0.01)):
        outcome = simulate(trace, policy_name, capacity_of(trace, fraction))
        results[f"simulate {policy_name} at {100 * fraction:g} %"] = {
            "hit_percent": round(outcome.hit_percent, 3),
            "cpu_seconds": round(outcome.cpu_seconds, 1),
            "wall_seconds": round(outcome.seconds, 1),
        }
        print(policy_name, fraction, outcome.hit_percent, outcome.cpu_seconds, outcome.seconds, flush=True)
    command = ["python", "benchmarks/retention_cost.py", Path(path).name]
    save(record("retention_cost", command, results), Path(__file__).parent / "results")


if __name__ == "__main__":
    main(sys.argv[1])
