"""A vLLM engine in a process of its own, told what to do in JSON lines over a pipe. Run by conftest.Engine.

    python engine_host.py COMMANDS_FD ANSWERS_FD '{"model": …, "config": …, "processes": "one" | "own", …}'

With processes "one", scheduler and worker share this process, so that scenarios can look inside and break things;
with "own" the engine runs as vLLM runs it, and only calls that any user has are answered.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# One thread: two that wait for each other at barriers crawl on a machine that is busy with other tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


class Host:
    def __init__(self, options: dict[str, Any]) -> None:
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
            defaults = {"kvtier_config": options["config"], "model": "tiny", "lookup_deadline": "30s"}
            arguments = {**defaults, **options.get("arguments", {})}
            transfer = {
                "kv_transfer_config": {
                    "kv_connector": "KVTierConnector",
                    "kv_connector_module_path": "kvtier.connectors.vllm",
                    "kv_role": "kv_both",
                    "kv_load_failure_policy": options.get("policy", "recompute"),
                    "kv_connector_extra_config": arguments,
                }
            }
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
        self._g3 = ((options.get("config") or {}).get("tiers", {}).get("g3") or {}).get("path", "")

    # ── what any user can do ────────────────────────────────────────────────────────────────────────────────

    def generate(
        self,
        prompts: list[list[int]],
        tokens: int = 24,
        salt: str | None = None,
        control: Any = None,
        settle: bool = True,
    ) -> list[dict[str, Any]]:
        from vllm import SamplingParams

        extra = None if control is None else {"kv_transfer_params": {"kvtier": control}}
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=extra)
        asked = [{"prompt_token_ids": p, **({"cache_salt": salt} if salt else {})} for p in prompts]
        outs = self.llm.generate(asked, sampling, use_tqdm=False)
        if settle:
            self.settle()
        return [
            {
                "tokens": list(out.outputs[0].token_ids),
                "cached": out.num_cached_tokens,
                "finish": out.outputs[0].finish_reason,
                "read": ((out.kv_transfer_params or {}).get("kvtier") or {}).get("tokens_read", {}),
            }
            for out in outs
        ]

    def reset(self, connector: bool = False) -> bool:
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

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
        current = self.half._core.current
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

    def counters(self) -> dict[str, int]:
        return dict(self.half.counters)

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
            "visits": len(self.half._visits),
            "loading": len(self.half._loading),
            "storing": len(self.half._storing),
            "dirty": len(self.half._dirty),
            "pinned": self.cache.stats()["g2"]["pinned"],
            "quarantined": self.cache.stats()["g2"]["quarantined"],
            "blocks_used": held.num_gpu_blocks - 1 - held.get_num_free_blocks(),
        }

    def namespace(self) -> dict[str, Any]:
        return dict(self.half._core.namespace.fields())

    # ── faults ──────────────────────────────────────────────────────────────────────────────────────────────

    def break_loads(self, how: str, positions: list[int] | None = None) -> None:
        """`zeros`: loads bring zeros and say they succeeded; `fail`: the given positions of the next load fail;
        `hang`: loads are not answered until `mend`."""
        worker = self.worker
        if how == "zeros":
            plain = worker.load

            def zeros(loads: Any) -> None:
                plain(loads)
                worker.poll()
                tensors = worker._described.memory.keep
                for job in loads:
                    for tensor in tensors:
                        for block in job.moves.blocks:
                            tensor[block].zero_()

            worker.load = zeros
        elif how == "fail":
            submit = worker._submit

            def fail(moves: Any, request: str) -> None:
                submit(moves, request)
                if request and "used" not in self._faults:
                    self._faults["used"] = True
                    failed = {p for p in positions or [0] if p < len(moves.blocks)}
                    worker._failed[moves.job] = failed
                    worker.poll()
                    for tensor in worker._described.memory.keep:
                        for position in failed:
                            tensor[moves.blocks[position]].fill_(7.0)

            self._faults.pop("used", None)
            worker._submit = fail
        elif how == "hang":
            held: list[Any] = []
            self._faults["held"] = held
            worker.load = held.extend
        else:
            raise ValueError(how)

    def break_scheduler(self) -> None:
        """Every call into the scheduler half raises."""

        def broken(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("injected")

        for name in ("arrive", "match", "plan", "completed", "finish"):
            setattr(self.half, name, broken)

    def mend(self) -> None:
        for name in ("load", "_submit"):
            self.worker.__dict__.pop(name, None)
        for name in ("arrive", "match", "plan", "completed", "finish"):
            self.half.__dict__.pop(name, None)
        held = self._faults.pop("held", [])
        if held:
            self.worker.load(held)

    def _sicken(self, *faults: Any) -> None:
        from kvtier.testing import FaultyTier

        guard = self.cache.manager.lower["g3"].inner
        while not isinstance(guard.inner, FaultyTier) and hasattr(guard.inner, "inner"):
            guard = guard.inner
        if not isinstance(guard.inner, FaultyTier):
            guard.inner = FaultyTier(guard.inner)
        guard.inner.faults = list(faults)

    def error_disk(self) -> None:
        from kvtier.testing import Fault

        self._sicken(Fault("*", "error"))

    def hang_disk(self) -> None:
        from kvtier.testing import Fault

        self._sicken(Fault("read", "hang"), Fault("write", "hang"), Fault("flush", "hang"), Fault("lookup", "hang"))

    def heal_disk(self) -> None:
        self._sicken()

    def corrupt_disk(self) -> int:
        """Flip a byte in every 4 KiB of every slab file. Returns how many files."""
        from pathlib import Path

        files = [
            p for p in Path(self._g3).rglob("*") if p.is_file() and p.stat().st_size >= 1 << 20 and p.suffix != ".mdb"
        ]
        for path in files:
            with path.open("r+b") as file:
                for start in range(0, min(path.stat().st_size, 64 << 20), 4096):
                    file.seek(start + 17)
                    byte = file.read(1)
                    file.seek(start + 17)
                    file.write(bytes([byte[0] ^ 0xFF]))
        return len(files)

    def patience(self, lookup_deadline: float) -> None:
        from dataclasses import replace

        self.half._limits = replace(self.half._limits, lookup_deadline=lookup_deadline)

    def timed(self, prompts: list[list[int]], tokens: int = 4) -> dict[str, Any]:
        """Like generate; `seconds` from the first to the last."""
        began = time.monotonic()
        outs = self.generate(prompts=prompts, tokens=tokens, settle=False)
        return {"tokens": [out["tokens"] for out in outs], "seconds": time.monotonic() - began}

    # ── scenarios that need single steps ────────────────────────────────────────────────────────────────────

    def add(self, name: str, prompt: list[int], tokens: int = 24) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

    def abort(self, name: str) -> None:
        self.llm.llm_engine.abort_request([name])

    def run_out(self) -> None:
        engine = self.llm.llm_engine
        while engine.has_unfinished_requests():
            engine.step()

    def resident(self, prompt: list[int]) -> list[int]:
        """How many blocks of a prompt are in G2, and in any tier, under the engine's own hashes."""
        return self._resident(prompt)

    def _resident(self, prompt: list[int]) -> list[int]:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        from kvtier.block import SHARED, make_keys

        request = Request(
            request_id="probe",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=self.core.request_block_hasher,
        )
        chain = make_keys(SHARED, [bytes(digest) for digest in request.block_hashes])
        return [self.cache.manager.prefix(chain), self.cache.match(chain, 5.0)]

    def heard(self) -> list[dict[str, Any]]:
        """KV events that the engine published since the last call."""
        batches, self._batches[:] = list(self._batches), []
        return [
            {
                "kind": type(event).__name__,
                "hashes": [str(digest) for digest in getattr(event, "block_hashes", [])],
                "parent": str(getattr(event, "parent_block_hash", None) or ""),
                "tokens": list(getattr(event, "token_ids", [])),
                "medium": getattr(event, "medium", None),
                "locality": getattr(event, "locality", None),
                "ownership": getattr(event, "ownership", None),
            }
            for batch in batches
            for event in batch.events
        ]

    def stored_blocks(self) -> list[str]:
        """Hashes of everything in G2."""
        return sorted(key[-32:].hex() for key in self.cache.manager.host.index)


def main(kind: type[Host] = Host) -> None:
    commands, answers = os.fdopen(int(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w")

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        host = kind(json.loads(sys.argv[3]))
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
