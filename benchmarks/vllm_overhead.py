"""Cost of the vLLM connector to an engine that gets no hits from it.

    python benchmarks/vllm_overhead.py steps  --save benchmarks/results     share of step time inside its calls
    python benchmarks/vllm_overhead.py jitter --save benchmarks/results     p99 of decode steps while G3 promotes

Scheduler and worker share the process, as on one GPU, and both are timed inside one run against the steps around them,
because two runs on a shared machine differ by more than what is measured.

`steps`: every prompt is new, so nothing is ever found and everything is stored: the worst case. For two random models:
`tiny`, whose attention cache is large against its arithmetic (3 kFLOP per byte of KV; an 8B model has 122), and `small`
(21 kFLOP). On a CPU the copies are made on the engine's thread (a GPU's copy engines make them beside it), so they are
listed by themselves.

`jitter`: requests that only decode, in windows of `--window` seconds: while nothing is promoted (`pausing`), while the
engine's own cache promotes from disk at full rate, its G3 in a process of its own (`process`), while a cache in the
engine's process does whose G3 works on threads (`threads`), and while another process does all of it over an arena of
its own (`elsewhere`). Each round of windows gives ratios to the pausing one. What `elsewhere` costs is the machine's
(memory bandwidth, cores, host); what the others cost more is the interpreter lock's. `kept_waiting` is the share of
time in which the thread that computes did not run, a steadier figure than ratios of steps on a shared host. With
`--cores apart` that thread has one core to itself and everything else shares another: a GPU's engine does not compute
where promotion does. With `--executor mp` the forward has a process to itself, as it has with several ranks: then the
engine's own cache is the one on threads.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

SCHEDULER = ("arrive", "match", "allocated", "plan", "completed", "finish", "pending", "counted")
COPY = ("start", "load", "store", "poll", "answer")
# hidden, intermediate, layers, heads, KV heads, head size; tokens per block
MODELS = {
    "tiny": (256, 512, 4, 8, 2, 32, 32),
    "small": (1024, 2816, 8, 16, 2, 64, 32),
    "wide": (512, 1024, 8, 8, 8, 64, 64),  # 2 MiB per block
}
STORED_TOKENS, OUTPUT_TOKENS = 500, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("steps", "jitter"))
    parser.add_argument("--model", choices=MODELS, help="only this one")
    parser.add_argument("--prompts", type=int, default=0, help="steps: requests (tiny 240, small 40)")
    parser.add_argument("--window", type=float, default=4.0, help="jitter: seconds")
    parser.add_argument("--rounds", type=int, default=20, help="jitter: windows of each kind")
    parser.add_argument("--threads", type=int, default=1, help="of the forward")
    parser.add_argument("--cores", choices=("shared", "apart"), default="shared", help="jitter: who computes where")
    parser.add_argument("--executor", choices=("uni", "mp"), default="uni", help="jitter: where the forward runs")
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
    os.environ.update(OMP_NUM_THREADS=str(args.threads), VLLM_CPU_OMP_THREADS_BIND="nobind")
    from kvtier.bench.record import record, save

    if args.what == "steps":
        results: dict[str, Any] = {}
        for name in [args.model] if args.model else ["tiny", "small"]:
            results[name] = steps(name, args.prompts or {"tiny": 240}.get(name, 40))
    else:
        results = jitter(args.model or "wide", args.window, args.rounds, args.cores == "apart", args.executor)
    variant = "_apart" * (args.cores == "apart") + "_mp" * (args.executor == "mp")
    name = "vllm_overhead" if args.what == "steps" else f"vllm_jitter{variant}"
    entry = record(name, ["python", *sys.argv], results)
    print(json.dumps(entry, indent=2))
    if args.save:
        save(entry, args.save)


@contextmanager
def engine(
    name: str,
    tiers: dict[str, Any],
    budget: int,
    executor: str = "uni",
    publishes: Sequence[str] | None = None,
    mode: str = "auto",
    **arguments: Any,
) -> Iterator[Any]:
    """A vLLM engine inside this process with a random model; the forward too, unless `executor` is mp. `publishes`: KV
    events, with those of these tiers of kvtier's; None: no events. `mode`: of offloads. `arguments`: more of the
    connector's."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from vllm import LLM

    hidden, inner, layers, heads, kv_heads, head_dim, block = MODELS[name]
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=1024, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, max_position_embeddings=4096,
        bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(shape).float().save_pretrained(folder)
        llm = LLM(
            model=folder, skip_tokenizer_init=True, dtype="float32", seed=0, max_model_len=4096, block_size=block,
            num_gpu_blocks_override=512, gpu_memory_utilization=0.2, enforce_eager=True,
            max_num_batched_tokens=budget, async_scheduling=False, distributed_executor_backend=executor,
            **({} if publishes is None else {"kv_events_config": _publisher()}),
            kv_transfer_config={
                "kv_connector": "KVTierConnector", "kv_connector_module_path": "kvtier.connectors.vllm",
                "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "kvtier_config": {"tiers": tiers, "offload": {"mode": mode, "dirty_max_age": "1s"}}, "model": name,
                    **arguments, **({} if publishes is None else {"event_tiers": list(publishes)}),
                },
            },
        )  # fmt: skip
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.engine_core.shutdown()


def _publisher() -> dict[str, Any]:
    """Over sockets of this process's own, to nobody: the events are made, encoded and sent all the same."""
    names = {"endpoint": "inproc://events", "replay_endpoint": "inproc://replay"}
    return {"enable_kv_cache_events": True, "publisher": "zmq", **names}


def parts(llm: Any) -> tuple[Any, Any]:
    """The engine's core, and the connector's half there."""
    core = llm.llm_engine.engine_core.engine_core
    return core, core.scheduler.connector._scheduler


def steps(name: str, prompts: int) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    spent = {"scheduler": 0.0, "copy": 0.0}
    seen: list[tuple[float, float, float]] = []
    with engine(name, {"g2": {"capacity": "512MiB"}}, 1024) as llm:
        core, half = parts(llm)
        worker = get_kv_transfer_group()._worker

        def timed(owner: Any, call: str, kind: str) -> None:
            plain = getattr(owner, call)

            def measured(*arguments: Any) -> Any:
                began = time.perf_counter()
                try:
                    return plain(*arguments)
                finally:
                    spent[kind] += time.perf_counter() - began

            setattr(owner, call, measured)

        for call in SCHEDULER:
            timed(half, call, "scheduler")
        for call in COPY:
            timed(worker, call, "copy")
        plain_step = core.step_fn

        def step() -> Any:
            before, began = dict(spent), time.perf_counter()
            out = plain_step()
            seen.append((time.perf_counter() - began, *(spent[kind] - before[kind] for kind in spent)))
            return out

        core.step_fn = core.step = step
        dice = random.Random(0)
        asked = [
            {"prompt_token_ids": [dice.randrange(3, 1000) for _ in range(STORED_TOKENS)]} for _ in range(prompts + 4)
        ]
        sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
        llm.generate(asked[:4], sampling, use_tqdm=False)
        seen.clear()
        stored = half.counters["blocks_stored"]
        spent.update(scheduler=0.0, copy=0.0)
        outs = llm.generate(asked[4:], sampling, use_tqdm=False)
        assert all(out.num_cached_tokens == 0 for out in outs)
        total = sum(one[0] for one in seen)
        return {
            "steps": len(seen),
            "step_ms_median": 1e3 * statistics.median(one[0] for one in seen),
            "scheduler_share": sum(one[1] for one in seen) / total,
            "copy_share": sum(one[2] for one in seen) / total,
            "share": sum(spent.values()) / total,  # calls between steps included
            "scheduler_us_median": 1e6 * statistics.median(one[1] for one in seen),
            "blocks_stored": half.counters["blocks_stored"] - stored,
            "bytes_stored": (half.counters["blocks_stored"] - stored) * half._manager.host.block_bytes,
            "lost": half.counters["spill_lost"],
        }


LABELS = ("pausing", "process", "threads", "elsewhere")
LABELS_MP = ("pausing", "threads", "elsewhere")


def jitter(name: str, window: float, rounds: int, apart: bool, executor: str) -> dict[str, Any]:
    import kvtier

    compute, rest = cores(apart)
    os.sched_setaffinity(0, rest)  # threads inherit it: all that the cache starts
    labels = LABELS_MP if executor == "mp" else LABELS
    took: dict[str, list[list[float]]] = {label: [] for label in labels}
    kept: dict[str, list[float]] = {label: [] for label in labels}
    rates: dict[str, list[float]] = {label: [] for label in labels}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        llm = stack.enter_context(engine(name, tiers_in(f"{folder}/g3"), 1024, executor))
        for worker in multiprocessing.active_children():
            move(worker.pid, compute)
        _, half = parts(llm)
        namespace, size = half._caches.namespace, half._caches.namespace.block_bytes
        promoting = {"elsewhere": stack.enter_context(child_promoting(llm, folder, rest))}
        caches = {labels[1]: half._caches.current[0]}
        if "process" in labels:
            config = kvtier.Config.parse({"tiers": tiers_in(f"{folder}/g3-threads")})
            caches["threads"] = stack.enter_context(kvtier.open(config, namespace))
        for label, cache in caches.items():
            go, blocks = promoting[label] = threading.Event(), Count()
            chains = store_chains(cache, namespace)
            threading.Thread(target=promote, args=(cache, chains, go, blocks), daemon=True).start()
        os.sched_setaffinity(0, compute)  # this thread alone
        decode = Decoding(llm)
        for number in range(rounds + 1):  # the first warms up
            turn = number % len(labels)
            for label in labels[turn:] + labels[:turn]:
                switch, blocks = promoting.get(label, (threading.Event(), Count()))
                switch.set()
                decode.steps(0.3)
                before, began, computed = blocks.value, time.monotonic(), time.thread_time()
                seen = decode.steps(window)
                came, passed, computed = blocks.value - before, time.monotonic() - began, time.thread_time() - computed
                switch.clear()
                time.sleep(0.3)
                if number:
                    took[label].append(seen)
                    kept[label].append(1 - computed / passed)
                    rates[label].append(came * size / passed)
    waiting = {"kept_waiting": {label: summary(kept[label]) for label in labels}} if executor == "uni" else {}
    return {"cores": "apart" if apart else "shared", "executor": executor, "rounds": rounds, "block_bytes": size,
            **waiting, **ratios(took, rates)}  # fmt: skip


def tiers_in(path: str) -> dict[str, Any]:
    return {"g2": {"capacity": "512MiB"}, "g3": {"path": path, "capacity": "4GiB"}}


def cores(apart: bool) -> tuple[set[int], set[int]]:
    """For the thread that computes, and for all the rest."""
    mine = sorted(os.sched_getaffinity(0))
    if not apart:
        return set(mine), set(mine)
    if len(mine) < 2:
        sys.exit("--cores apart needs two cores")
    return {mine[0]}, {mine[1]}


def move(process: int, where: set[int]) -> None:
    """All its threads run there."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        os.sched_setaffinity(int(thread.name), where)


class Decoding:
    """Four requests that decode, again and again."""

    def __init__(self, llm: Any) -> None:
        from vllm import SamplingParams

        self._engine = llm.llm_engine
        self._asked = 0
        self._sampling = SamplingParams(
            temperature=0, max_tokens=3900, ignore_eos=True, detokenize=False,
            extra_args={"kv_transfer_params": {"kvtier": {"load": False, "store": False}}},
        )  # fmt: skip

    def steps(self, seconds: float) -> list[float]:
        """Duration of each step."""
        seen: list[float] = []
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if not self._engine.has_unfinished_requests():
                for _ in range(4):
                    self._asked += 1
                    prompt = [(self._asked * 37 + i) % 1000 + 3 for i in range(64)]
                    self._engine.add_request(f"r{self._asked}", {"prompt_token_ids": prompt}, self._sampling)
                self._engine.step()
                self._engine.step()
            began = time.perf_counter()
            self._engine.step()
            seen.append(time.perf_counter() - began)
        return seen


def ratios(took: dict[str, list[list[float]]], rates: dict[str, list[float]]) -> dict[str, Any]:
    def paired(label: str) -> dict[str, Any]:
        return {
            name: summary([take(a) / take(b) for a, b in zip(took[label], took["pausing"], strict=True)])
            for name, take in (("p99", p99), ("median", statistics.median))
        }

    pooled = {label: [t for one in windows for t in one] for label, windows in took.items()}
    promoting = [label for label in took if label != "pausing"]
    return {
        "steps_per_window": statistics.median(len(one) for one in took["pausing"]),
        "promoted_bytes_per_s": {label: statistics.median(rates[label]) for label in promoting},
        **{f"{label}_to_pausing": paired(label) for label in promoting},
        "pooled_ms": {
            label: {"median": 1e3 * statistics.median(steps), "p99": 1e3 * p99(steps)}
            for label, steps in pooled.items()
        },
    }


def p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def summary(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "quartile_1": low, "quartile_3": high}


class Count:
    """A number that one thread raises and another reads."""

    def __init__(self) -> None:
        self.value = 0


def store_chains(cache: Any, namespace: Any) -> list[Any]:
    """A GiB of blocks on disk; returns their chains. G2 holds half of it, so each comes from disk when its turn is."""
    import kvtier
    from kvtier.testing import payloads_of

    size = namespace.block_bytes
    length = min(32, (128 << 20) // size)
    chains = [
        kvtier.chain_hashes([seed] * (length * namespace.block_tokens), namespace, salt=f"promoted-{seed}")
        for seed in range(1, 1 + (1 << 30) // (length * size))
    ]
    for chain in chains:
        cache.put(chain, payloads_of(chain, size), timeout=60)
    cache.flush(120)
    return chains


def promote(cache: Any, chains: Sequence[Any], go: Any, blocks: Any) -> None:
    """Bring chains into G2 as the connector does, one after another, while `go` is set. Never returns."""
    manager = cache.manager

    async def fetch(chain: Any) -> int:
        with await manager.promote(chain, time.monotonic() + 30) as lease:
            return sum(tier == "g3" for tier in lease.tiers)

    while True:
        for chain in chains:
            go.wait()
            blocks.value += cache.submit(fetch(chain)).result()


@contextmanager
def child_promoting(llm: Any, folder: str, where: set[int]) -> Iterator[tuple[Any, Any]]:
    """A process that promotes over tiers of its own while its switch is set; the switch, and its count of blocks."""
    fields = parts(llm)[1]._caches.namespace.fields()
    tiers = tiers_in(f"{folder}/g3-elsewhere")
    context = multiprocessing.get_context("spawn")
    go, blocks = context.Event(), context.Value("q", 0)
    child = context.Process(target=promote_in_child, args=(tiers, fields, go, blocks, where), daemon=True)
    child.start()
    try:
        while not go.wait(0.1):  # the child sets it when it has stored
            assert child.is_alive()
        go.clear()
        yield go, blocks
    finally:
        child.kill()
        child.join()


def promote_in_child(tiers: dict[str, Any], fields: dict[str, Any], go: Any, blocks: Any, where: set[int]) -> None:
    import kvtier

    os.sched_setaffinity(0, where)
    namespace = kvtier.Namespace(**fields)
    with kvtier.open(kvtier.Config.parse({"tiers": tiers}), namespace) as cache:
        chains = store_chains(cache, namespace)
        go.set()
        time.sleep(1.0)
        promote(cache, chains, go, blocks)


if __name__ == "__main__":
    main()
