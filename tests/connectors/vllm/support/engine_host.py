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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # run by itself with -P, which leaves its folder out

from engine_faults import Faults
from engine_groups import GroupsOfEngine
from engine_requests import Requests
from mended_kernels import mend_mamba2

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# One thread: two that wait for each other at barriers crawl on a machine that is busy with other tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


_COUNTED = (
    "vllm:external_prefix_cache_hits", "vllm:num_preemptions", "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
)  # fmt: skip


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


class Host(Requests, GroupsOfEngine, Faults):
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
            insist_on(engine)
        if options.get("mended"):
            mend_mamba2()
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
            elif metric.name.startswith("vllm:kvtier_") and hasattr(metric, "value"):  # a histogram has none
                found[f"{metric.name}:{metric.labels.get('tier') or metric.labels.get('event')}"] = metric.value
            elif metric.name in _COUNTED:
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


def insist_on(engine: dict[str, Any]) -> None:
    """Keep options that the CPU platform switches off: asynchronous scheduling for want of use, and what latent
    attention cannot do there."""
    from vllm.platforms import current_platform

    plain = type(current_platform).check_and_update_config.__func__
    places = {
        "async_scheduling": "scheduler_config",
        "enable_chunked_prefill": "scheduler_config",
        "enable_prefix_caching": "cache_config",
    }

    def check(cls: Any, config: Any) -> None:
        plain(cls, config)
        for name in places.keys() & engine.keys():
            setattr(getattr(config, places[name]), name, engine[name])

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
