"""One SGLang engine on a CPU that replays prompts one after another. Run by `kvtier.bench.peers.sglang`; its input and
output are those of `kvtier.bench.peers.vllm_engine`."""

from __future__ import annotations

import time
from typing import Any

from kvtier.bench.peers.vllm_engine import read_job
from kvtier.testing import sglang_cpu

if __name__ in ("__main__", "__mp_main__"):  # not on import: it replaces modules that others need
    sglang_cpu.install()

_CPU = {
    "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "attention_backend": "torch_native",
    "sampling_backend": "pytorch", "grammar_backend": "none", "disable_overlap_schedule": True,
    "disable_cuda_graph": True, "mem_fraction_static": 0.1, "max_running_requests": 4, "log_level": "error",
    "sleep_on_idle": True,
}  # fmt: skip


def main() -> None:
    job, report = read_job()
    began = time.monotonic()
    import sglang

    engine = sglang.Engine(**{**_CPU, **job["engine"]})
    _ask(engine, [7] * 40, job)  # warm-up, not measured
    report(ready=time.monotonic() - began)
    computed = 0
    for prompt in job["prompts"]:
        out, first_s = _ask(engine, prompt, job)
        computed += len(prompt) - out["meta_info"]["cached_tokens"]
        margins = _margins(engine, prompt, job) if job["margins"] else []
        report(tokens=out["output_ids"], ttft_s=first_s, cached=out["meta_info"]["cached_tokens"], margins=margins)
    report(computed=computed, prompted=sum(len(prompt) for prompt in job["prompts"]))
    time.sleep(job["settle_s"])
    engine.shutdown()


def _ask(engine: Any, prompt: list[int], job: dict[str, Any]) -> tuple[Any, float]:
    """The last answer of a stream, which has all its tokens, and the time to the first.

    The answers before it share one list that SGLang extends later, so its length says nothing about them.
    """
    began = time.monotonic()
    answers = engine.generate(input_ids=prompt, sampling_params=_sampling(job), stream=True)
    first = next(answers)
    first_s = time.monotonic() - began
    out = [first, *answers][-1]
    if len(out["output_ids"]) != job["tokens"]:
        raise RuntimeError(f"{len(out['output_ids'])} tokens came, {job['tokens']} were asked for")
    return out, first_s


def _margins(engine: Any, prompt: list[int], job: dict[str, Any]) -> list[float]:
    """Log-probability of the best token above the second, per step."""
    given = engine.generate(input_ids=prompt, sampling_params=_sampling(job), return_logprob=True, top_logprobs_num=2)
    out = []
    for step in given["meta_info"]["output_top_logprobs"]:
        best = sorted((entry[0] for entry in step), reverse=True)
        out.append(float(best[0] - best[1]) if len(best) > 1 else float("inf"))
    return out


def _sampling(job: dict[str, Any]) -> dict[str, Any]:
    return {"max_new_tokens": job["tokens"], "temperature": 0, "ignore_eos": True}


if __name__ == "__main__":
    main()
