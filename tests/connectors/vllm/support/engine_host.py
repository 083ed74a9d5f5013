"""A vLLM engine in a process of its own, driven by JSON lines over a pipe. Run by conftest.Engine.

    python engine_host.py '{"model": …, "config": …, "processes": "one" | "own", …}' COMMANDS_FD ANSWERS_FD

With processes "one", scheduler and worker share this process, so that scenarios can look inside and break things;
with "own" the engine runs as vLLM runs it, and only calls that any user has are answered.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
import traceback
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # run by itself with -P, which leaves its folder out

from engine_faults import Faults

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# One thread: two that wait for each other at barriers crawl on a machine that is busy with other tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def set_plugin(present: bool) -> None:
    """Whether vLLM finds kvtier's plug-in: here and in its processes, however this tree is installed."""
    if not present:
        os.environ["VLLM_PLUGINS"] = "none"
        return
    found = Path(tempfile.mkdtemp(prefix="kvtier-plugin")) / "kvtier_of_this_tree-0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtier-of-this-tree\nVersion: 0\n")
    (found / "entry_points.txt").write_text("[vllm.general_plugins]\nkvtier = kvtier.connectors.vllm.plugin:register\n")
    sys.path.append(str(found.parent))
    os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(found.parent)]).lstrip(os.pathsep)


class Counting(deque[Any]):
    """Takes note of leases that the garbage collector had to release."""

    total = 0

    def append(self, holds: Any) -> None:
        self.total += 1
        super().append(holds)


class Logs(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Host(Faults):
    def __init__(self, options: dict[str, Any]) -> None:
        self._logs = Logs()
        logging.getLogger("kvtier").addHandler(self._logs)
        set_plugin(options.get("plugin", True))
        self.inside = options.get("processes", "one") == "one"
        engine = dict(options.get("engine", {}))
        if self.inside:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            engine.setdefault("distributed_executor_backend", "uni")
        from vllm import LLM

        if options.get("events"):
            engine["kv_events_config"] = {"enable_kv_cache_events": True, "publisher": "null"}
        transfer = {}
        if options.get("config") is not None:
            # A busy machine may need seconds for what takes milliseconds; deadlines have tests of their own.
            # A tiny model computes faster than any disk reads.
            defaults = {
                "kvtier_config": options["config"],
                "model": "tiny",
                "lookup_deadline": "30s",
                "recompute": "never",
            }
            arguments = {**defaults, **options.get("arguments", {})}
            connector = {
                "kv_connector": "KVTierConnector",
                "kv_connector_module_path": "kvtier.connectors.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": options.get("policy", "recompute"),
                "kv_connector_extra_config": arguments,
            }
            if options.get("several"):
                more = {"kv_connector_extra_config": {"connectors": [connector]}}
                connector = {**connector, **more, "kv_connector": "MultiConnector"}
                del connector["kv_connector_module_path"]
            transfer = {"kv_transfer_config": connector}
        if options.get("insist"):
            insist_on_async_scheduling()
        self.llm = LLM(
            **{
                "model": options["model"],
                "skip_tokenizer_init": True,
                "dtype": "float32",
                "seed": 0,
                "max_model_len": 2048,
                "block_size": 32,
                "num_gpu_blocks_override": 128,
                "gpu_memory_utilization": 0.2,
                "enforce_eager": True,
                "disable_log_stats": False,
                "max_num_batched_tokens": 512,
                "async_scheduling": False,
                **transfer,
                **engine,
            }
        )
        self._faults: dict[str, Any] = {}
        self._batches: list[Any] = []
        if options.get("events") and self.inside:
            self.core.scheduler.kv_event_publisher.publish = self._batches.append
        self._calls: list[list[Any]] = []
        self._waits: list[float] = []
        self._forgotten = Counting()
        if self.inside and getattr(self.connector, "_scheduler", None) is not None:
            self.cache.manager._housekeeping._forgotten = self._forgotten

    # ── what any user can do ────────────────────────────────────────────────────────────────────────────────

    def generate(
        self,
        prompts: list[list[int]],
        tokens: int = 24,
        salt: str | None = None,
        control: Any = None,
        settle: bool = True,
        adapter: list[Any] | None = None,
    ) -> list[dict[str, Any]]:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        extra = None if control is None else {"kv_transfer_params": {"kvtier": control}}
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=extra)
        asked = [{"prompt_token_ids": p, **({"cache_salt": salt} if salt else {})} for p in prompts]
        lora = {"lora_request": LoRARequest(*adapter)} if adapter else {}
        outs = self.llm.generate(asked, sampling, use_tqdm=False, **lora)
        if settle:
            self.settle()
        return [
            {
                "tokens": list(out.outputs[0].token_ids),
                "cached": out.num_cached_tokens,
                "finish": out.outputs[0].finish_reason,
                "id": out.request_id,
                "answer": (out.kv_transfer_params or {}).get("kvtier") or {},
                "read": ((out.kv_transfer_params or {}).get("kvtier") or {}).get("tokens_read", {}),
            }
            for out in outs
        ]

    def ask(
        self,
        prompts: list[list[int]],
        tokens: int = 24,
        salt: str | None = None,
        sampling: dict[str, Any] | None = None,
        choice: list[str] | None = None,
        beam: int = 0,
        priorities: bool = False,
        adapter: list[Any] | None = None,
    ) -> list[dict[str, Any]]:
        """All answers to each prompt, however they are sampled."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

        asked = [{"prompt_token_ids": p, **({"cache_salt": salt} if salt else {})} for p in prompts]
        if beam:
            found = self.llm.beam_search(asked, BeamSearchParams(beam_width=beam, max_tokens=8, ignore_eos=True))
            return [{"all": [list(one.tokens) for one in out.sequences], "read": {}} for out in found]
        given: dict[str, Any] = {"temperature": 0, "max_tokens": tokens, "ignore_eos": not choice, **(sampling or {})}
        if choice:
            given["structured_outputs"] = StructuredOutputsParams(choice=choice)
        params = SamplingParams(detokenize=False, **given)
        more: dict[str, Any] = {"lora_request": LoRARequest(*adapter)} if adapter else {}
        if priorities:
            more["priority"] = [number % 3 for number in range(len(prompts))]
        outs = self.llm.generate(asked, params, use_tqdm=False, **more)
        return [
            {
                "all": [list(one.token_ids) for one in out.outputs],
                "read": ((out.kv_transfer_params or {}).get("kvtier") or {}).get("tokens_read", {}),
            }
            for out in outs
        ]

    def reload(self, path: str) -> None:
        """New weights in place, as a trainer's loop has it."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})

    def load_adapter(self, adapter: list[Any]) -> bool:
        from vllm.lora.request import LoRARequest

        return bool(self.llm.llm_engine.add_lora(LoRARequest(*adapter)))

    def settled(self) -> bool:
        """Whether there is a cache; waits for it."""
        deadline = time.monotonic() + 30
        while self.cache is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.cache is not None

    def reset(self, connector: bool = False) -> bool:
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def sources(self) -> dict[str, float]:
        """vLLM's own account: prompt tokens by where they came from, and what goes by a name of its own."""
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if metric.name == "vllm:prompt_tokens_cached_by_source":
                found[metric.labels["source"]] = metric.value
            elif metric.name.startswith("vllm:kvtier_"):
                found[f"{metric.name}:{metric.labels.get('tier') or metric.labels.get('event')}"] = metric.value
            elif metric.name in ("vllm:external_prefix_cache_hits", "vllm:num_preemptions"):
                found[metric.name] = metric.value
        return found

    def logs(self) -> list[str]:
        """What kvtier has logged in this process."""
        return self._logs.lines

    # ── with the scheduler in this process ──────────────────────────────────────────────────────────────────

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def connector(self) -> Any:
        return self.core.scheduler.connector

    @property
    def half(self) -> Any:
        return self.connector._scheduler

    @property
    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker

    @property
    def cache(self) -> Any:
        current = self.half._caches.current
        return None if current is None else current[0]

    def settle(self) -> None:
        """What an engine in its own process does by itself when it is idle."""
        if self.inside and self.connector is not None:
            deadline = time.monotonic() + 10
            while (self.connector.has_pending_push_work() or self.core.scheduler.has_requests()) and (
                time.monotonic() < deadline
            ):
                self.core.step_fn()

    def steps(self, count: int = 1) -> None:
        for _ in range(count):
            self.llm.llm_engine.step()

    def is_async(self) -> bool:
        return bool(self.core.async_scheduling) and self.core.batch_queue is not None

    def counters(self) -> dict[str, int]:
        return dict(self.half.counters)

    def limits(self) -> dict[str, Any]:
        return asdict(self.half._limits)

    def pending(self) -> bool:
        """Whether the connector keeps an idle engine stepping."""
        return bool(self.connector.has_pending_push_work())

    def copied_from(self) -> list[int]:
        """Blocks of the pool that are being copied out."""
        return [block for work in self.half._stores._storing.values() for block in work.blocks()]

    def renamed(self) -> int:
        """How many of them have been filled anew with the same content, and so have an equal name."""
        names = self.core.scheduler.kv_cache_manager.block_pool.blocks
        runs = [run for work in self.half._stores._storing.values() for run in work.runs]
        copies = [copy for run in runs for copy in zip(run.blocks, run.tokens, strict=True)]
        found = [(names[block].block_hash, token) for block, token in copies]
        return sum(now == then and now is not then for now, then in found)

    def hand_out_next(self, blocks: list[int]) -> None:
        """Bring these free blocks to the head of the pool's queue, in this order."""
        queue = self.core.scheduler.kv_cache_manager.block_pool.free_block_queue
        free = queue.get_all_free_blocks()
        for block in free:
            queue.remove(block)
        first = {number: place for place, number in enumerate(blocks)}
        queue.append_n(sorted(free, key=lambda block: first.get(block.block_id, len(first))))

    def stats(self) -> Any:
        return self.cache.stats()

    def flush(self) -> dict[str, Any]:
        flushed = self.cache.flush(10)
        return {"durable": dict(flushed.durable), "dropped": flushed.dropped, "pending": flushed.pending}

    def evict(self, tier: str) -> int:
        return int(self.cache.evict(tier))

    def check(self) -> dict[str, int]:
        """Invariants, and what must be zero when the engine is idle."""
        self.cache.flush(10)  # what waits for a lower tier is pinned
        self.half.check()
        self.cache.check()
        scheduler = self.core.scheduler
        held = scheduler.kv_cache_manager.block_pool
        return {
            "requests": len(self.half._requests),
            "loading": len(self.half._loads),
            "storing": len(self.half._stores._storing),
            "dirty": len(self.half._stores._dirty),
            "pinned": self.cache.stats()["g2"]["pinned"],
            "quarantined": self.cache.stats()["g2"]["quarantined"],
            "blocks_used": held.num_gpu_blocks - 1 - held.get_num_free_blocks(),
            "forgotten": self._forgotten.total,
        }

    def prefill_cost(self) -> float | None:
        """Seconds per block that the manager has learned."""
        cost: float | None = self.cache.manager.promoter._compute_s_per_block
        return cost

    def namespace(self) -> dict[str, Any]:
        return dict(self.half._caches.namespace.fields())

    def namespace_digest(self) -> str:
        return str(self.half._caches.namespace.digest.hex())

    def _track(self, name: str) -> Any:
        return next(state.track for key, state in self.half._requests.items() if key.startswith(name))

    def steps_until_placed(self, name: str) -> None:
        """Step until a request has blocks: it may wait for an answer from disk before."""
        deadline = time.monotonic() + 30
        while not self._track(name).table and time.monotonic() < deadline:
            self.llm.llm_engine.step()

    def record_calls(self) -> None:
        """Note the scheduler half's answers, and the calls of each step of the worker."""
        calls = self._calls = []
        half, worker, cache = self.half, self.worker, self.cache

        def noted(owner: Any, name: str, note: Any) -> None:
            plain = getattr(owner, name)

            def call(*arguments: Any, **more: Any) -> Any:
                out = plain(*arguments, **more)
                calls.append([name, note(arguments, out)])
                return out

            owner.__dict__[name] = call

        noted(half, "match", lambda arguments, out: list(out))
        noted(half, "allocated", lambda arguments, out: arguments[2])
        noted(worker, "start", lambda arguments, out: arguments[0])
        noted(worker, "store", lambda arguments, out: len(arguments[0]))
        noted(cache.manager, "promote", lambda arguments, out: len(arguments[0]))

    def calls(self) -> list[list[Any]]:
        """What `record_calls` noted; ends the recording."""
        for owner, names in (
            (self.half, ("match", "allocated")),
            (self.worker, ("start", "store")),
            (self.cache.manager, ("promote",)),
        ):
            for name in names:
                owner.__dict__.pop(name, None)
        calls, self._calls = self._calls, []
        return calls

    def record_waits(self) -> None:
        """Note how long requests are asked again."""
        plain, began, waits = self.half.match, {}, self._waits

        def match(request: Any, computed: int) -> Any:
            now = time.monotonic()
            out = plain(request, computed)
            if out[0] is None:
                began.setdefault(request.request_id, now)
            elif request.request_id in began:
                waits.append(now - began.pop(request.request_id))
            return out

        self.half.match = match

    def waits(self) -> list[float]:
        return self._waits

    def prefetch_of(self, name: str) -> str:
        """State of a waiting request's promotion; kept for after its end."""
        for key, state in self.half._requests.items():
            if key.startswith(name):
                self._faults["prefetch"] = state.promoted.future
        future = self._faults.get("prefetch")
        return "none" if future is None else "cancelled" if future.cancelled() else "done" if future.done() else "runs"

    def named_in_pool(self, prompt: list[int]) -> int:
        """Leading blocks of a prompt that the engine's own cache has."""
        return int(self.half._pool.resident(self._chain(prompt)))

    def timed(self, prompts: list[list[int]], tokens: int = 4) -> dict[str, Any]:
        """Like generate; `seconds` from the first to the last."""
        began = time.monotonic()
        outs = self.generate(prompts=prompts, tokens=tokens, settle=False)
        return {"tokens": [out["tokens"] for out in outs], "seconds": time.monotonic() - began}

    # ── scenarios that need single steps ────────────────────────────────────────────────────────────────────

    def add(self, name: str, prompt: list[int], tokens: int = 24, load: bool = True) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False,
            extra_args={"kv_transfer_params": {"kvtier": {"load": load}}},
        )  # fmt: skip
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

    def embed(self, prompts: list[list[int]]) -> list[list[float]]:
        """What a pooling model answers."""
        outs = self.llm.embed([{"prompt_token_ids": one} for one in prompts], use_tqdm=False)
        return [[round(value, 4) for value in out.outputs.embedding] for out in outs]

    def has_cache(self) -> bool:
        return self.half is not None

    def session(self, name: str, parts: list[list[int]], tokens: int) -> list[list[int]]:
        """A streaming session: inputs one after another, each answered with so many tokens, of which vLLM drops the
        last one when the next input comes. Returns all tokens of the session after each answer."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        scheduler, seen = self.core.scheduler, []

        def send(part: list[int], resumable: bool) -> None:
            sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            self.core.add_request(
                Request(
                    request_id=name, prompt_token_ids=list(part), sampling_params=sampling, pooling_params=None,
                    block_hasher=self.core.request_block_hasher, resumable=resumable,
                )
            )  # fmt: skip

        for part in parts:
            send(part, True)
            deadline = time.monotonic() + 60
            while scheduler.get_num_unfinished_requests() and time.monotonic() < deadline:
                self.core.step_fn()
            seen.append(list(scheduler.requests[name].all_token_ids))
        send([1], False)
        self.settle()
        return seen

    def abort(self, name: str) -> None:
        self.llm.llm_engine.abort_request([name])

    def steps_to_end(self, limit: int) -> int:
        """Step until all requests have ended, `limit` times at most; how often that was."""
        engine, count = self.llm.llm_engine, 0
        while engine.has_unfinished_requests() and count < limit:
            engine.step()
            count += 1
        return count

    def unfinished(self) -> list[str]:
        """Names of requests that have not ended."""
        return [key.rpartition("-")[0] for key in self.half._requests]

    def run_out(self) -> dict[str, list[int]]:
        """Step until all requests have ended. Returns what they sampled, by name."""
        engine = self.llm.llm_engine
        ended = {}
        while engine.has_unfinished_requests():
            for out in engine.step():
                ended[out.request_id] = list(out.outputs[0].token_ids) if out.finished else []
        return ended

    def resident(self, prompt: list[int]) -> list[int]:
        """How many blocks of a prompt are in G2, and in any tier, under the engine's own hashes."""
        chain = self._chain(prompt)
        return [self.cache.manager.prefix(chain), self.cache.match(chain, 5.0)]

    def _chain(self, prompt: list[int]) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        from kvtier.identity.keys import SHARED, make_keys

        request = Request(
            request_id="probe",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=self.core.request_block_hasher,
        )
        return make_keys(SHARED, [bytes(digest) for digest in request.block_hashes])

    def heard(self) -> list[dict[str, Any]]:
        """KV events that the engine published since the last call."""
        batches, self._batches[:] = list(self._batches), []
        return [
            {
                "kind": type(event).__name__,
                "hashes": hashes,
                "parent": parent,
                "tokens": tokens,
                "medium": getattr(event, "medium", None),
                "locality": getattr(event, "locality", None),
                "ownership": getattr(event, "ownership", None),
            }
            for batch in batches
            for event in batch.events
            for hashes, parent, tokens in blocks_of(event)
        ]

    def pins(self, count: int) -> dict[str, int]:
        """Named pins, and how many of their blocks are in G2; waits a while for `count` of them."""
        deadline = time.monotonic() + 10
        while len(pins := self.cache.pins.list()) < count and time.monotonic() < deadline:
            time.sleep(0.05)
        return {pin.name: pin.resident for pin in pins}

    def unpin(self) -> None:
        for pin in self.cache.pins.list():
            self.cache.pins.delete(pin.name)

    def stored_blocks(self) -> list[str]:
        """Hashes of everything in G2."""
        return sorted(key[-32:].hex() for key in self.cache.manager.host.index)


def blocks_of(event: Any) -> list[tuple[list[str], str, list[int]]]:
    """Hashes, parent and tokens of an event: block by block where it names the tokens of several."""
    hashes = [str(digest) for digest in getattr(event, "block_hashes", [])]
    parent, tokens = str(getattr(event, "parent_block_hash", None) or ""), list(getattr(event, "token_ids", []))
    size = getattr(event, "block_size", 0)
    if not tokens or not size:
        return [(hashes, parent, tokens)]
    parents = [parent, *hashes[:-1]]
    return [([name], parents[i], tokens[i * size : (i + 1) * size]) for i, name in enumerate(hashes)]


def insist_on_async_scheduling() -> None:
    """The CPU platform switches it off, for want of use."""
    from vllm.platforms import current_platform

    plain = type(current_platform).check_and_update_config.__func__

    def check(cls: Any, config: Any) -> None:
        plain(cls, config)
        config.scheduler_config.async_scheduling = True

    type(current_platform).check_and_update_config = classmethod(check)


def main(kind: type[Host] = Host) -> None:
    commands, answers = os.fdopen(int(sys.argv[2])), os.fdopen(int(sys.argv[3]), "w")

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        host = kind(json.loads(sys.argv[1]))
    except BaseException as error:
        answer(error="".join(traceback.format_exception(error))[-6000:])
        raise
    answer(result=None)
    for line in commands:
        call = json.loads(line)
        try:
            answer(result=getattr(host, call["name"])(**call["arguments"]))
        except BaseException as error:
            answer(error="".join(traceback.format_exception(error))[-6000:])
    if host.inside:
        host.core.shutdown()


if __name__ == "__main__":
    main()
