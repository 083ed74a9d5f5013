"""Cost of kvtier to a vLLM engine beside an earlier checkout of kvtier, request beside request.

    make -C EARLIER types
    python benchmarks/vllm_since.py --before EARLIER --save benchmarks/results

Two engines run at once, one with this tree's connector and one with the earlier one's, each in a process of its own,
and get the same requests one after another, in the order before-now-now-before. Each is asked twice: its prompt is
`new`, and all of it is stored; then the engine's own cache is reset, and what was stored is `loaded` from G2. A figure
is the processor time of the whole process for one request, with all that it stores. `cost`: the median over all pairs
of how much more it takes now, as a share of what it took; `low` and `high` bound that median with 95 % confidence. Two
processes lie differently in memory, so each round starts both anew, and tells its own median. `control` is the same
with the earlier checkout on both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vllm_events import median_of
from vllm_overhead import OUTPUT_TOKENS, STORED_TOKENS, engine, parts

HERE = Path(__file__).resolve().parent
WARM_UP = 4
KINDS = ("new", "loaded")
IDLE_S = 5.0
"""At most, for what a request leaves to be stored."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="an earlier checkout, after `make types`")
    parser.add_argument("--model", choices=("tiny", "small"), action="append", help="only these")
    parser.add_argument("--pairs", type=int, default=30, help="of a round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--no-control", action="store_true", help="only now and before")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--engine", choices=("tiny", "small"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine:
        answer(given.engine)
        return
    from kvtier.bench.record import record, save

    before, now = given.before.resolve(), HERE.parent
    results: dict[str, Any] = {"before": commit_of(before), "pairs": given.pairs, "rounds": given.rounds}
    for model in given.model or ["tiny", "small"]:
        results[model] = {"now to before": compared(model, before, now, given.rounds, given.pairs)}
        if not given.no_control:
            results[model]["control"] = compared(model, before, before, given.rounds, given.pairs)
    entry = record("vllm_since", ["python", *sys.argv], results)
    print(json.dumps(entry, indent=2))
    if given.save:
        save(entry, given.save)


def commit_of(tree: Path) -> str:
    done = subprocess.run(["git", "-C", str(tree), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def compared(model: str, before: Path, now: Path, rounds: int, pairs: int) -> dict[str, Any]:
    """By kind of request: processor time now, and what it was before."""
    found: dict[str, list[list[tuple[float, float]]]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        for kind, one in one_round(model, before, now, pairs, number).items():
            found[kind].append(one)
    return {kind: figures_of(per_round) for kind, per_round in found.items()}


def figures_of(per_round: Sequence[Sequence[tuple[float, float]]]) -> dict[str, Any]:
    every = [pair for pairs in per_round for pair in pairs]
    return {
        "before_cpu_ms": round(1e3 * statistics.median(before for before, _ in every), 3),
        **{name: round(one, 4) for name, one in median_of([now / before - 1 for before, now in every]).items()},
        "per_round": [round(statistics.median(now / before - 1 for before, now in pairs), 4) for pairs in per_round],
    }


def one_round(model: str, before: Path, now: Path, pairs: int, seed: int) -> dict[str, list[tuple[float, float]]]:
    """Pairs of processor times before and now, by kind."""
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    with ExitStack() as stack:
        engines = [_Engine(stack, tree, model) for tree in (before, now)]
        for one in engines:
            one.ready()
        dice = random.Random(seed)
        for number in range(WARM_UP + pairs):
            asked = dice.randrange(1 << 30)
            order = (0, 1) if number % 2 == seed % 2 else (1, 0)
            for kind in KINDS:
                took = dict.fromkeys(order, 0.0)
                for place in order:
                    took[place] = engines[place].ask(kind, asked)
                if number >= WARM_UP:
                    found[kind].append((took[0], took[1]))
    return found


class _Engine:
    """An engine with a checkout's connector, in a process of its own, which starts; ends with the stack."""

    def __init__(self, stack: ExitStack, tree: Path, model: str) -> None:
        path = os.pathsep.join([str(tree / "build" / "types"), str(HERE)])
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(HERE / "vllm_since.py"), "--engine", model, "--before", str(tree)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        stack.callback(self._end)
        self._tree = tree

    def ready(self) -> None:
        where = Path(self._line()["kvtier"])
        if self._tree not in where.parents:
            raise SystemExit(f"the engine of {self._tree} runs {where}")

    def ask(self, kind: str, seed: int) -> float:
        """Seconds of processor time."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"kind": kind, "seed": seed}) + "\n")
        self._process.stdin.flush()
        return float(self._line()["cpu_s"])

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("an engine has ended")
        return dict(json.loads(line))

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def answer(model: str) -> None:
    """An engine in this process answers what comes on its input."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
    os.environ.update(OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print
    with engine(model, {"g2": {"capacity": "512MiB"}}, 1024, mode="eager", recompute="never") as llm:
        from vllm import SamplingParams

        import kvtier.manager

        core, _ = parts(llm)
        sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
        where = str(Path(kvtier.manager.__file__).resolve())
        answers.write(json.dumps({"kvtier": where}) + "\n")
        answers.flush()
        for line in sys.stdin:
            asked = json.loads(line)
            if asked["kind"] == "loaded":
                assert llm.reset_prefix_cache()
            dice = random.Random(asked["seed"])
            prompt = {"prompt_token_ids": [dice.randrange(3, 1000) for _ in range(STORED_TOKENS)]}
            began = time.process_time()
            (out,) = llm.generate([prompt], sampling, use_tqdm=False)
            connector, until = core.scheduler.connector, time.monotonic() + IDLE_S
            while connector.has_pending_push_work() and time.monotonic() < until:
                core.step_fn()
            spent = time.process_time() - began
            assert (out.num_cached_tokens > 0) == (asked["kind"] == "loaded")
            answers.write(json.dumps({"cpu_s": spent}) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
