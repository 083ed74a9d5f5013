"""One vLLM engine that replays prompts one after another, in a process of its own. Run by `kvtier.bench.peers.vllm`.

    python -P vllm_engine.py < '{"engine": {…}, "prompts": [[…], …], "tokens": 8, "margins": false, "control": null}'

With `"in_turn": true` it waits for a line on standard input before each prompt. With `"prompts": null` the lines are
the prompts, until the input ends.

Scheduler and worker share the process (VLLM_ENABLE_V1_MULTIPROCESSING=0), which starts in a third of the time. An
engine in a process of its own goes on stepping while it is idle and its connector has work; here that happens between
two requests, for at most IDLE_S, and at the end for at most END_S, for every contender alike.

Imports vLLM and nothing of kvtier, so that an interpreter with another cache's packages can run it. Writes JSON lines:
{"ready": seconds}, one {"tokens", "ttft_s", "cpu_s", "cached", "margins"} per prompt, {"computed", "prompted"} at the
end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

IDLE_S, END_S = 0.5, 5.0


def read_job() -> tuple[dict[str, Any], Callable[..., None]]:
    """The job on standard input, and a function that writes one line of the report to standard output. From then on
    all else that this process prints goes to standard error."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def report(**fields: Any) -> None:
        lines.write(json.dumps(fields) + "\n")
        lines.flush()

    return json.loads(sys.stdin.readline()), report


def main() -> None:
    job, report = read_job()
    began = time.monotonic()
    if "LMCache" in str(job["engine"].get("kv_transfer_config")):
        _hide_attributes_of_llvmlite()
    from vllm import LLM, SamplingParams

    llm = LLM(**job["engine"])
    sampling = SamplingParams(
        temperature=0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False,
        logprobs=2 if job["margins"] else None,
        extra_args={"kv_transfer_params": {"kvtier": job["control"]}} if job.get("control") else None,
    )  # fmt: skip
    # Warm-up, not measured.
    llm.generate([{"prompt_token_ids": [7] * 40}], sampling, use_tqdm=False)
    before = _sources(llm)
    report(ready=time.monotonic() - began)
    prompted = 0
    for prompt in _prompts(job):
        prompted += len(prompt)
        computing = time.process_time()
        (out,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        computing = time.process_time() - computing
        _idle(llm, IDLE_S)
        report(
            tokens=list(out.outputs[0].token_ids),
            ttft_s=out.metrics.first_token_latency,
            cpu_s=computing,
            cached=out.num_cached_tokens or 0,
            margins=[_margin(step) for step in out.outputs[0].logprobs] if job["margins"] else [],
        )
    after = _sources(llm)
    report(
        computed=after.get("local_compute", 0) - before.get("local_compute", 0),
        prompted=prompted,
    )
    _idle(llm, END_S)
    llm.llm_engine.engine_core.engine_core.shutdown()


def _prompts(job: dict[str, Any]) -> Iterator[list[int]]:
    """The job's, each in its turn."""
    if job["prompts"] is None:
        yield from map(json.loads, iter(sys.stdin.readline, ""))
        return
    for prompt in job["prompts"]:
        if job.get("in_turn"):
            sys.stdin.readline()
        yield prompt


def _hide_attributes_of_llvmlite() -> None:
    """LMCache brings numba, whose handle of LLVM's library answers any name with a function. vLLM 0.32 for CPUs, which
    looks for kernels to replace in whatever modules hold, asks it for its `__dict__`, and stops at what comes back."""
    import_module("llvmlite.binding.ffi").lib._fntab["__dict__"] = {}


def _idle(llm: Any, most_s: float) -> None:
    """Step as an engine in its own process does while no request is left."""
    core = llm.llm_engine.engine_core.engine_core
    connector, until = core.scheduler.connector, time.monotonic() + most_s
    while connector is not None and time.monotonic() < until:
        if not (connector.has_pending_push_work() or core.scheduler.has_requests()):
            return
        core.step_fn()


def _sources(llm: Any) -> dict[str, float]:
    """Prompt tokens by where their KV came from, by the engine's own account."""
    return {
        metric.labels.get("source", ""): metric.value
        for metric in llm.get_metrics()
        if metric.name == "vllm:prompt_tokens_by_source"
    }


def _margin(step: Any) -> float:
    """Log-probability of the best token above the second."""
    best = sorted((entry.logprob for entry in step.values()), reverse=True)
    return float(best[0] - best[1]) if len(best) > 1 else float("inf")


if __name__ == "__main__":
    main()
