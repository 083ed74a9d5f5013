"""The demo's two processes, one after the other, and the summary of their reports. Imports no torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from kvtier.demo.job import TIERS, Job
from kvtier.errors import KVTierError

PROCESS_TIMEOUT_S = 900.0
_STDERR_LINES = 12

Watch = Callable[[str, Mapping[str, Any]], None]
"""Called with "first" or "second" and one turn's report, as it comes."""


@dataclass(frozen=True, slots=True)
class Act:
    """One process: its turns' reports in order, and its final report."""

    turns: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)

    @property
    def bytes_identical(self) -> bool:
        """Every restored block had the bytes it was stored with, and there were some."""
        return all(turn["bytes_same"] for turn in self.turns) and any(turn["blocks_restored"] for turn in self.turns)

    @property
    def tokens_identical(self) -> bool:
        """Every turn's tokens were those of an in-memory hit, and of a full prefill but for ties."""
        return bool(self.turns) and all(t["tokens_same"] and t["gap"] < self.end["gap"] for t in self.turns)

    def summary(self) -> dict[str, Any]:
        """The keys that are reported for either process."""
        hits = [turn for turn in self.turns if turn["blocks_restored"]]
        return {
            "tokens_identical": self.tokens_identical,
            "bytes_identical": self.bytes_identical,
            "served_tokens": {name: self.end["served"][name] for name in (*TIERS, "recomputed")},
            "served_blocks_by_group": self.end.get("groups", {}),
            "ttft_ms": {
                "hit": _median(turn["ttft_hit_ms"] for turn in hits),
                "recompute": _median(turn["ttft_recompute_ms"] for turn in hits),
            },
            "checks": {
                "blocks_compared": sum(turn["blocks_restored"] for turn in self.turns),
                "turns": len(self.turns),
                "turns_parting_from_prefill": sum(turn["gap"] > 0 for turn in self.turns),
                "largest_gap": max((turn["gap"] for turn in self.turns), default=0.0),
                "gap_tolerance": self.end["gap"],
            },
        }


def _median(values: Iterable[float]) -> float | None:
    kept = list(values)
    return round(median(kept), 2) if kept else None


def perform(job: Job, watch: Watch = lambda name, turn: None) -> tuple[Act, Act]:
    """Run both processes. Blocks until they have ended. Raises KVTierError if one fails."""
    first = _process("first", job, watch)
    second = _process("second", replace(job, resume=True), watch)
    return first, second


def result(first: Act, second: Act) -> dict[str, Any]:
    """The one object of `--json`. Pure."""
    return {
        **first.summary(),
        "second_process": second.summary(),
        "block_bytes": first.end["block_bytes"],
        "turns": [*first.turns, *({**turn, "process": "second"} for turn in second.turns)],
    }


def _process(name: str, job: Job, watch: Watch) -> Act:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(asdict(job), file)
        file.flush()
        # -P: where it is run may lie modules of others, with names of those that it imports.
        command = [sys.executable, "-P", "-m", "kvtier.demo.run", file.name]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, errors="replace") as child:
            assert child.stdout is not None and child.stderr is not None
            last_words: list[str] = []
            listener = threading.Thread(target=_listen, args=(child.stderr, last_words), daemon=True)
            listener.start()
            watchdog = threading.Timer(PROCESS_TIMEOUT_S, child.kill)
            watchdog.start()
            try:
                act = _act(name, child.stdout, watch)
            except BaseException:
                child.kill()
                raise
            finally:
                status = child.wait()
                watchdog.cancel()
                listener.join()
    if "message" in act.end:
        raise KVTierError(f"the {name} process: {act.end['message']}")
    if status != 0 or not act.end:
        raise KVTierError(f"the {name} process ended with status {status}: {' '.join(last_words).strip()}")
    return act


def _act(name: str, lines: Iterable[str], watch: Watch) -> Act:
    act = Act()
    for line in lines:
        report = json.loads(line)
        event = report.pop("event")
        if event == "turn":
            act.turns.append(report)
            watch(name, report)
        else:
            act.end.update(report)
    return act


def _listen(lines: Iterable[str], last_words: list[str]) -> None:
    for line in lines:
        last_words.append(line)
        del last_words[:-_STDERR_LINES]


def turns_in(jobs: Sequence[Job]) -> int:
    """Turns of all processes together. Pure."""
    return sum(job.conversations if job.resume else job.conversations * job.turns for job in jobs)
