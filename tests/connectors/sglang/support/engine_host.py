"""Runs one SGLang engine on the CPU driven by lines of JSON, each answered by another.

    python engine_host.py '{"model_path": …, more arguments of sgl.Engine}' [forked] ORDERS_FD ANSWERS_FD

With "forked" it runs in a process that was forked from one that has imported SGLang, and so do the engine's. Orders
are {"do": one of VERBS, …}.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

HERE = str(Path(__file__).resolve().parent)
sys.path.insert(0, HERE)
os.environ["PYTHONPATH"] = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)

_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "SGLANG_MAMBA_CONV_DTYPE": "float32",  # where the models are float32, SGLang tracks a state with no other
}
for name, value in _ENVIRONMENT.items():
    os.environ.setdefault(name, value)

from kvtier.testing import sglang_cpu  # noqa: E402

sglang_cpu.install()

DEFAULTS = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.1,
    "max_total_tokens": 4096,
    "page_size": 16,
    "log_level": "warning",
    "sleep_on_idle": True,  # an idle scheduler spins otherwise
}


def request_of(order: dict[str, Any]) -> Any:
    from sglang.srt.managers.io_struct import GenerateReqInput

    sampling = {"max_new_tokens": order.get("new", 8), "temperature": 0, "ignore_eos": True}
    if "kvtier" in order:
        sampling["custom_params"] = {"kvtier": order["kvtier"]}
    named = {name: order[name] for name in ("extra_key", "cache_salt", "rid", "lora_path") if name in order}
    return GenerateReqInput(
        input_ids=order["prompts"], sampling_params=sampling, return_logprob=order.get("logprobs", True),
        top_logprobs_num=2, **named,
    )  # fmt: skip


def abort(engine: Any, order: dict[str, Any]) -> str:
    """Send a request, abort it after a while, and say how it ended."""

    async def run() -> str:
        manager = engine.tokenizer_manager
        asking = asyncio.ensure_future(anext(manager.generate_request(request_of({**order, "rid": ["gone"]}), None)))
        await asyncio.sleep(order["after"])
        if asking.done():
            return "finished before"
        manager.abort_request(rid="gone")
        try:
            result = await asyncio.wait_for(asking, 60)
        except Exception as error:
            return type(error).__name__
        return str(result[0]["meta_info"]["finish_reason"]["type"])

    return str(engine.loop.run_until_complete(run()))


def generate(engine: Any, order: dict[str, Any]) -> list[dict[str, Any]]:
    began = time.monotonic()
    asking = anext(engine.tokenizer_manager.generate_request(request_of(order), None))
    results = engine.loop.run_until_complete(asking)
    return [answer_of(result, time.monotonic() - began) for result in results]


def staggered(engine: Any, order: dict[str, Any]) -> list[dict[str, Any]]:
    """As generate, but each prompt is a request of its own, sent `apart` seconds after the one before it."""

    async def one(number: int, tokens: list[int]) -> dict[str, Any]:
        await asyncio.sleep(number * order["apart"])
        began = time.monotonic()
        (result,) = await anext(
            engine.tokenizer_manager.generate_request(request_of({**order, "prompts": [tokens]}), None)
        )
        return answer_of(result, time.monotonic() - began)

    async def run() -> list[dict[str, Any]]:
        return await asyncio.gather(*[one(*numbered) for numbered in enumerate(order["prompts"])])

    return list(engine.loop.run_until_complete(run()))


def answer_of(result: dict[str, Any], seconds: float) -> dict[str, Any]:
    meta = result["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    return {
        "tokens": list(result["output_ids"]),
        "logprobs": [step[0] for step in meta.get("output_token_logprobs", [])],
        "gaps": [max(step)[0] - min(step)[0] for step in meta.get("output_top_logprobs", [])],
        "answer": meta.get("kvtier"),
        "cached": meta["cached_tokens"],
        "host": details.get("host", 0),
        "storage": details.get("storage", 0),
        "seconds": seconds,
    }


def update(engine: Any, order: dict[str, Any]) -> list[Any]:
    """SGLang calls it a failure where the last step's batch is still there when the order comes: asked again then."""
    for _ in range(20):
        answer = engine.update_weights_from_disk(order["path"])
        if answer[0]:
            break
        time.sleep(0.2)
    return [bool(answer[0]), str(answer[1])]


def flush(engine: Any, order: dict[str, Any]) -> str:
    flushing = engine.tokenizer_manager.flush_cache(timeout_s=30)
    return "flushed" if engine.loop.run_until_complete(flushing).success else "busy"


VERBS = {"generate": generate, "staggered": staggered, "abort": abort, "flush": flush, "update": update}


def main() -> None:
    orders, answers = os.fdopen(int(sys.argv[-2])), os.fdopen(int(sys.argv[-1]), "w")

    def say(answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    import sglang

    if "COVERAGE_PROCESS_CONFIG" in os.environ:
        let_them_save()
    from state_kernels import allow_tracking  # beside this file

    allow_tracking()
    if "forked" in sys.argv[2:]:
        fork_the_others()
    engine = sglang.Engine(**{**DEFAULTS, **json.loads(sys.argv[1])})
    say("ready")
    for line in orders:
        order = json.loads(line)
        try:
            say(VERBS[order["do"]](engine, order))
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})
    engine.shutdown()


def fork_the_others() -> None:
    """Fork the engine's processes from this one: SGLang has them begin anew, and import everything again."""
    set_start_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: set_start_method("fork", force)


def let_them_save(seconds: float = 20) -> None:
    """SGLang kills its processes outright, and one that measures coverage writes its figures when it ends: SIGTERM."""
    import psutil
    from sglang.srt.entrypoints import engine

    killed = engine.kill_process_tree

    def ended(*args: Any, **named: Any) -> None:
        children = psutil.Process().children(recursive=True)
        for child in children:
            child.terminate()
        psutil.wait_procs(children, timeout=seconds)
        killed(*args, **named)

    engine.kill_process_tree = ended


if __name__ == "__main__":
    main()
