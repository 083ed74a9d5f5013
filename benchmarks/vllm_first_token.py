"""Time to the first token in vLLM with kvtier, with vLLM's own offloading, and without either, request beside request.

    python benchmarks/vllm_first_token.py --rounds 5 --save benchmarks/results

The contenders of `kvtier bench peers --engine vllm`, and an engine without any cache, answer the same slice of a trace.
All of their engines run at once, each with a disk and host memory of its own, and get each request one after another,
in another order each time, so that whatever else the machine does slows all alike. What kvtier's choices are worth is
told by three without them: `kvtier always` loads whatever it finds, `kvtier between` does so between steps only,
`kvtier never` only stores. `cpu_ms` is the processor time of the engine's process for a request. `other_answers` counts
requests with other tokens than without a cache. Rounds are added to a file that is there already.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvtier.bench.peers import vllm
from kvtier.bench.peers.contest import ENVIRONMENT, Contest, end_process
from kvtier.bench.peers.prompts import make_model, prompts_of, slice_of
from kvtier.bench.record import record, save

NAME = "vllm_first_token"
BASE = "no cache"
CONTENDERS = (BASE, "nothing", "kvtier", "native", *vllm.VARIANTS)
PAUSE_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--save", type=Path, required=True)
    given = parser.parse_args()
    kept = given.save / f"{NAME}.json"
    rounds = json.loads(kept.read_text())["results"]["rounds"] if kept.exists() else []
    command = ["python", "benchmarks/vllm_first_token.py", *sys.argv[1:]]
    for _ in range(given.rounds):
        rounds.append(figures_of(one_round(given.requests, seed=len(rounds))))
        results = {"requests": given.requests, "middle": middle(rounds), "rounds": rounds}
        save(record(NAME, command, results), given.save)
        print(json.dumps(rounds[-1], indent=1))


def one_round(requests: int, seed: int) -> dict[str, list[dict[str, Any]]]:
    """What each contender's engine reported of every request."""
    order, found = random.Random(seed), {name: list[dict[str, Any]]() for name in CONTENDERS}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-first-token-")))
        prompts = prompts_of(slice_of(None, requests, 0))
        contest = Contest(make_model(folder / "tiny-llama"), prompts, 160, 512, folder, again=0)
        engines = {name: _Engine(stack, contest, name) for name in CONTENDERS}
        for engine in engines.values():
            engine.ready()
        for _ in prompts:
            for name in order.sample(CONTENDERS, len(CONTENDERS)):
                found[name].append(engines[name].next())
                time.sleep(PAUSE_S)  # what it still has to do is no burden of the next one
    return found


class _Engine:
    """A contender's engine, which starts; ends with the stack."""

    def __init__(self, stack: ExitStack, contest: Contest, name: str) -> None:
        folder = contest.folder / name
        folder.mkdir()
        base = {"enable_prefix_caching": False}
        more = base if name == BASE else stack.enter_context(vllm.transfer(contest, name, folder))
        errors = stack.enter_context((contest.folder / f"{name}.log").open("w"))
        self._process = subprocess.Popen(
            [*ENVIRONMENT, *vllm.command(contest, name)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
        )  # fmt: skip
        stack.callback(end_process, self._process, 0.0)
        self._say(json.dumps(vllm.job(contest, more, contest.prompts, in_turn=True)))

    def ready(self) -> None:
        """It has started."""
        self._line()

    def next(self) -> dict[str, Any]:
        """Its report of the next request."""
        self._say("")
        return self._line()

    def _say(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode() + b"\n")
        self._process.stdin.flush()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("an engine has ended; its log tells why")
        return dict(json.loads(line))


def figures_of(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Of one round: each contender's times, and what they are to those of `native` and of `nothing`."""
    times = {name: [1e3 * one["ttft_s"] for one in answers] for name, answers in found.items()}
    right = [one["tokens"] for one in found[BASE]]
    contenders = {
        name: {
            "ttft_ms_median": round(statistics.median(times[name]), 2),
            "ttft_ms_p90": round(_p90(times[name]), 2),
            "ttft_ms_sum": round(sum(times[name]), 1),
            "median_to_native": round(statistics.median(times[name]) / statistics.median(times["native"]), 3),
            "p90_to_native": round(_p90(times[name]) / _p90(times["native"]), 3),
            "median_to_nothing": round(statistics.median(times[name]) / statistics.median(times["nothing"]), 3),
            "sum_to_nothing": round(sum(times[name]) / sum(times["nothing"]), 3),
            "cpu_ms_median": round(1e3 * statistics.median(one["cpu_s"] for one in answers), 2),
            "cpu_ms_sum": round(1e3 * sum(one["cpu_s"] for one in answers), 1),
            "cached_tokens": sum(one["cached"] for one in answers),
            "other_answers": sum(one["tokens"] != tokens for one, tokens in zip(answers, right, strict=True)),
        }
        for name, answers in found.items()
    }
    better = min(sum(times[name]) for name in ("kvtier always", "kvtier never"))
    return {"contenders": contenders, "weighing_to_the_better": round(sum(times["kvtier"]) / better, 3)}


def middle(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds, and the extremes of each figure as its `spread`."""
    contenders: dict[str, Any] = {}
    for name in CONTENDERS:
        of = {what: [one["contenders"][name][what] for one in rounds] for what in rounds[0]["contenders"][name]}
        contenders[name] = {what: round(statistics.median(figures), 3) for what, figures in of.items()}
        contenders[name]["spread"] = {what: [min(figures), max(figures)] for what, figures in of.items()}
    weighing = statistics.median(one["weighing_to_the_better"] for one in rounds)
    return {"contenders": contenders, "weighing_to_the_better": weighing}


def _p90(times: Sequence[float]) -> float:
    return sorted(times)[int(0.9 * (len(times) - 1))]


if __name__ == "__main__":
    main()
