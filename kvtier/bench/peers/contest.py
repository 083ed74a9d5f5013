"""A contest: engines that replay the same prompts one after another, and how their tokens and their work compare."""

from __future__ import annotations

import json
import os
import selectors
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.errors import KVTierError

OUTPUT_TOKENS = 8
TIE = 1e-3
"""Tokens may differ from where the two best were closer than this in the engine without cache (log-probabilities)."""
START_S, REQUEST_S = 400.0, 60.0
ENVIRONMENT = (
    "env", "HF_HUB_OFFLINE=1", "VLLM_LOGGING_LEVEL=ERROR", "OMP_NUM_THREADS=1", "VLLM_CPU_OMP_THREADS_BIND=nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING=0", "PYTHONHASHSEED=0", "LMCACHE_TRACK_USAGE=false", "LMCACHE_DISABLE_BANNER=1",
    "LMCACHE_LOG_LEVEL=ERROR",
)  # fmt: skip


class PeerFailed(KVTierError):
    """A contender could not be run; the message gives the attempt and its error."""


@dataclass(frozen=True, slots=True)
class Replay:
    """One engine's answers to a list of prompts, and its work."""

    start_s: float
    seconds: float
    computed: int
    prompted: int
    tokens: list[list[int]]
    ttft_s: list[float]
    margins: list[list[float]]
    cpu_s: list[float] = field(default_factory=list)  # of the engine's process, per request, where it says


@dataclass(frozen=True, slots=True)
class Contest:
    """Engines compared on the same prompts. Sizes in blocks of the engine."""

    model: Path
    prompts: Sequence[Sequence[int]]
    gpu_blocks: int
    host_blocks: int
    folder: Path
    again: int = 30  # requests repeated after the restart; 0: no restart
    lmcache: Path | None = None  # an interpreter that has vLLM and LMCache
    progress: Callable[[str, int], None] = field(default=lambda name, done: None)  # contender, requests done

    def compare(
        self,
        names: Sequence[str],
        truth: Replay,
        arguments: Callable[[Contest, str, Path], AbstractContextManager[dict[str, Any]]],
        replay: Callable[[Contest, str, Mapping[str, Any], Sequence[Sequence[int]]], Replay],
    ) -> dict[str, Any]:
        """Figures per contender. `arguments` are those of the engine that switch one on, with a directory of its own;
        `replay` runs an engine. A contender that cannot be run has an entry with the reason."""
        out: dict[str, Any] = {"without_any_cache": _figures(truth, truth)}
        for name in names:
            try:
                folder = self.folder / name
                folder.mkdir(parents=True)
                with arguments(self, name, folder) as more:
                    entry = _figures(replay(self, name, more, self.prompts), truth)
                if self.again and name != "nothing":
                    last = self.prompts[-self.again :]
                    with arguments(self, name, folder) as more:
                        second = replay(self, name, more, last)
                    entry["after_restart"] = _figures(second, truth, len(self.prompts) - len(last))
                out[name] = entry
            except PeerFailed as failure:
                out[name] = {"not_run": str(failure)}
            except KeyboardInterrupt:  # minutes of measurement are worth showing
                out |= {rest: {"not_run": "interrupted"} for rest in names if rest not in out}
                break
        return out

    def run_engine(self, name: str, command: Sequence[str], job: Mapping[str, Any]) -> Replay:
        """Run a program that reads `job` from standard input and reports in JSON lines, as vllm_engine does.
        Raises PeerFailed."""
        errors = self.folder / f"{name}.log"
        with errors.open("a") as log:
            child = subprocess.Popen(
                [*ENVIRONMENT, *command],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
            )  # fmt: skip
            try:
                assert child.stdin is not None and child.stdout is not None
                child.stdin.write(json.dumps(job).encode())
                child.stdin.close()
                return self._collect(name, child.stdout, len(job["prompts"]))
            except (TimeoutError, EOFError) as failure:
                raise PeerFailed(f"the engine {failure}: {error_in(errors.read_text())}") from None
            finally:
                end_process(child, grace_s=30.0)

    def _collect(self, name: str, stream: Any, count: int) -> Replay:
        lines = _lines(stream)
        ready = next(lines)
        began = time.monotonic()
        outs = []
        for _ in range(count):
            outs.append(next(lines))
            self.progress(name, len(outs))
        took = time.monotonic() - began
        end = next(lines)
        return Replay(
            start_s=ready["ready"],
            seconds=took,
            computed=int(end["computed"]),
            prompted=int(end["prompted"]),
            tokens=[out["tokens"] for out in outs],
            ttft_s=[out["ttft_s"] for out in outs],
            margins=[out["margins"] for out in outs],
            cpu_s=[out["cpu_s"] for out in outs if "cpu_s" in out],
        )


def _lines(stream: Any) -> Iterator[dict[str, Any]]:
    """JSON objects from a child; the first may take a start's time."""
    buffer, patience = b"", START_S
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            while b"\n" not in buffer:
                if not selector.select(patience):
                    raise TimeoutError(f"did not answer for {patience:.0f} s")
                chunk = os.read(stream.fileno(), 1 << 16)
                if not chunk:
                    raise EOFError("ended")
                buffer += chunk
            line, _, buffer = buffer.partition(b"\n")
            patience = REQUEST_S
            yield json.loads(line)


def end_process(process: subprocess.Popen[Any], grace_s: float) -> None:
    """Wait for a process to end; after `grace_s` kill it, and in any case what else it started."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def error_in(text: str) -> str:
    """The last error in a log, or its last line."""
    text = text.partition("Exception ignored in")[0]  # an interpreter's own messages at its end follow the cause
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    return (errors or lines or ["its log is empty"])[-1][-300:]


def _figures(run: Replay, truth: Replay, start: int = 0) -> dict[str, Any]:
    differing, excused = differences(run.tokens, truth.tokens[start:], truth.margins[start:])
    return {
        "requests": len(run.tokens),
        "prompt_tokens": run.prompted,
        "computed_prompt_tokens": run.computed,
        "computed_share": run.computed / run.prompted,
        "ttft_ms_median": 1e3 * statistics.median(run.ttft_s),
        "ttft_ms_p90": 1e3 * sorted(run.ttft_s)[int(0.9 * (len(run.ttft_s) - 1))],
        "ttft_ms_p99": 1e3 * sorted(run.ttft_s)[int(0.99 * (len(run.ttft_s) - 1))],
        "replay_s": run.seconds,
        "start_s": run.start_s,
        "wrong_requests": differing,
        "requests_that_differ_at_a_tie": excused,
        "ttft_s": [round(value, 5) for value in run.ttft_s],
    }


def differences(
    found: Sequence[Sequence[int]], truth: Sequence[Sequence[int]], margins: Sequence[Sequence[float]]
) -> tuple[int, int]:
    """Requests whose tokens differ from the truth: for no good reason, and from a tie of the two best on. Pure."""
    wrong = tied = 0
    for mine, right, gaps in zip(found, truth, margins, strict=True):
        if list(mine) != list(right):
            first = next((i for i, (a, b) in enumerate(zip(mine, right, strict=False)) if a != b), None)
            close = first is not None and len(gaps) > first and gaps[first] < TIE
            tied, wrong = tied + close, wrong + (not close)
    return wrong, tied
