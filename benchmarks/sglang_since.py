"""Cost of kvtier's SGLang linker beside an earlier checkout of kvtier, call beside call, for plain full attention.

    make -C EARLIER types
    .venv-sglang/bin/python benchmarks/sglang_since.py --before EARLIER --save benchmarks/results

Two linkers over SGLang's device pool, without an engine, this tree's and the earlier one's, each in a process of its
own, do the same for one request of PAGES pages after another, in turn: `miss`, a look-up of new pages; `offload`, with
its copies; `offered_again`; `hit`; `load`. A figure is the processor time of the linker's thread. `cost`: the median
over all pairs of how much more it takes now, as a share of what it took; `low` and `high` bound that median with 95 %
confidence. Two processes lie differently in memory, so each round starts both anew, and tells its own median. `control`
is the same with the earlier checkout on both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_events import median_of

HERE = Path(__file__).resolve().parent
KINDS = ("miss", "offload", "offered_again", "hit", "load")
PAGES, WARM_UP = 32, 10
QUIET_S = 0.02
"""For what a call leaves to other threads."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="an earlier checkout, after `make types`")
    parser.add_argument("--pairs", type=int, default=40, help="of a round")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--linker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.linker:
        answer()
        return
    from vllm_since import commit_of

    from kvtier.bench.record import record, save

    before, now = given.before.resolve(), HERE.parent
    results = {
        "before": commit_of(before), "pages": PAGES, "pairs": given.pairs, "rounds": given.rounds,
        "now to before": compared(before, now, given.rounds, given.pairs),
        "control": compared(before, before, given.rounds, given.pairs),
    }  # fmt: skip
    entry = record("sglang_since", ["python", *sys.argv], results)
    print(json.dumps(entry, indent=2))
    if given.save:
        save(entry, given.save)


def compared(before: Path, now: Path, rounds: int, pairs: int) -> dict[str, Any]:
    """By kind of call: processor time now, and what it was before."""
    found: dict[str, list[list[tuple[float, float]]]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        one = one_round(before, now, pairs, number)
        for kind in KINDS:
            found[kind].append([(was[kind], took[kind]) for was, took in one])
    return {kind: figures_of(per_round) for kind, per_round in found.items()}


def figures_of(per_round: Sequence[Sequence[tuple[float, float]]]) -> dict[str, Any]:
    every = [pair for pairs in per_round for pair in pairs]
    return {
        "before_cpu_us": round(1e6 * statistics.median(before for before, _ in every), 1),
        **{name: round(one, 4) for name, one in median_of([now / before - 1 for before, now in every]).items()},
        "per_round": [round(statistics.median(now / before - 1 for before, now in pairs), 4) for pairs in per_round],
    }


def one_round(before: Path, now: Path, pairs: int, seed: int) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Pairs of seconds by kind, before and now."""
    out = []
    with linker(before) as one, linker(now) as other:
        for number in range(WARM_UP + pairs):
            order = (one, other) if number % 2 == seed % 2 else (other, one)
            took = {id(ask): ask(number) for ask in order}
            if number >= WARM_UP:
                out.append((took[id(one)], took[id(other)]))
    return out


@contextmanager
def linker(tree: Path) -> Iterator[Callable[[int], dict[str, float]]]:
    """A linker of a checkout, in a process of its own: it is asked with a request's number."""
    path = os.pathsep.join([str(tree / "build" / "types"), str(tree), str(HERE)])
    process = subprocess.Popen(
        [sys.executable, "-P", str(HERE / "sglang_since.py"), "--linker", "--before", str(tree)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    into, out = process.stdin, process.stdout

    def line() -> Any:
        if not (text := out.readline()):
            raise SystemExit(f"the linker of {tree} has ended")
        return json.loads(text)

    def ask(number: int) -> dict[str, float]:
        into.write(f"{number}\n")
        into.flush()
        return dict(line())

    try:
        if tree not in Path(line()).parents:
            raise SystemExit(f"the linker of {tree} is another checkout's")
        yield ask
    finally:
        into.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def answer() -> None:
    """The other end of `linker`."""
    import pytest
    import torch

    import kvtier
    from kvtier.testing import sglang_cpu

    sglang_cpu.install()
    torch.set_num_threads(1)
    from tests.connectors.sglang.support.linker_bench import Bench, keys_of

    with tempfile.TemporaryDirectory(prefix="kvtier-since-") as folder, pytest.MonkeyPatch.context() as patch:
        bench = Bench(patch, Path(folder), g2="256MiB")
        print(json.dumps(kvtier.__file__), flush=True)
        for line in sys.stdin:
            print(json.dumps(costs(bench, keys_of(PAGES, int(line)), line.strip())), flush=True)
        bench.linker.close()


def costs(bench: Any, keys: list[str], name: str) -> dict[str, float]:
    """Seconds of this thread for each kind of call of one request."""
    there, elsewhere = list(range(1, PAGES + 1)), list(range(PAGES, 0, -1))

    def offload() -> None:
        assert bench.offload(keys, there)
        assert bench.settle() == [True]

    def load() -> None:
        assert bench.linker.load(f"hit {name}", bench.transfer(keys, elsewhere)) and bench.run()

    calls: Mapping[str, Callable[[], object]] = {
        "miss": lambda: bench.lookup(f"miss {name}", keys),
        "offload": offload,
        "offered_again": offload,
        "hit": lambda: bench.lookup(f"hit {name}", keys),
        "load": load,
    }
    out, found = {}, {}
    for kind in KINDS:
        began = time.thread_time()
        found[kind] = calls[kind]()
        out[kind] = time.thread_time() - began
        time.sleep(QUIET_S)
    assert (found["miss"], found["hit"]) == (0, PAGES), found
    return out


if __name__ == "__main__":
    main()
