"""Prompt tokens of a replayed conversation trace that a vLLM engine with a small GPU pool computes, by cache below it.

    nothing        the engine's own prefix cache alone
    kvtier         KVTierConnector over G2 and G3
    native         vLLM's tiered offloading: its host cache and its fs tier
    native+kvtier  vLLM's tiered offloading: its host cache, and kvtier as its tier
    lmcache        LMCache's server (MP) with its fs_native adapter, through LMCacheMPConnector

and, if asked for, what its choices are worth: `kvtier always` loads whatever it finds, `kvtier between` does so between
steps only, `kvtier never` only stores.

All have as much host memory and the same disk. A slice of the trace is replayed one request after another; then the
engine (and LMCache's server) end, start again, and the slice's last requests are repeated. Each of the trace's
blocks of 512 tokens stands for one block of the engine, so that a small model on a CPU can follow. Every request's
tokens are compared with those of an engine without any cache.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtier.bench.peers.contest import ENVIRONMENT, OUTPUT_TOKENS, Contest, PeerFailed, Replay, end_process, error_in
from kvtier.bench.peers.prompts import BLOCK_BYTES, BLOCK_TOKENS, PROMPT_BLOCKS_MAX
from kvtier.errors import InvalidRequest
from kvtier.testing.servers import free_ports

NAMES = ("nothing", "kvtier", "native", "native+kvtier", "lmcache")
VARIANTS = ("kvtier always", "kvtier between", "kvtier never")
_ENGINE = Path(__file__).with_name("vllm_engine.py")


def compare(contest: Contest, names: Sequence[str] = NAMES) -> dict[str, Any]:
    """Figures per contender. Starts engines one after another; blocks for minutes. A contender that cannot be run has
    an entry with the reason."""
    truth = replay(contest, "oracle", {"enable_prefix_caching": False}, contest.prompts, margins=True)
    return contest.compare(names, truth, transfer, replay)


@contextmanager
def transfer(contest: Contest, name: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Arguments of the engine that switch a contender on, and `control`, kvtier's parameters of each request; what it
    needs beside the engine runs meanwhile."""
    host, disk = contest.host_blocks * BLOCK_BYTES, str(folder / "disk")
    if name == "nothing":
        yield {}
    elif name in ("kvtier", *VARIANTS):
        tiers = {"g2": {"capacity": host}, "g3": {"path": disk, "capacity": "4GiB"}}
        given: dict[str, Any] = {"kvtier_config": {"tiers": tiers}, "lookup_deadline": "1s"}
        if name in ("kvtier always", "kvtier between"):
            given["recompute"] = "never"
        if name == "kvtier between":
            given["in_step_bytes"] = 0
        arguments = _connector("KVTierConnector", "kvtier.connectors.vllm", **given)
        yield {**arguments, "control": {"load": name != "kvtier never"}}
    elif name == "native":
        yield _native(host, {"type": "fs", "root_dir": disk, "n_read_threads": 4, "n_write_threads": 4})
    elif name == "native+kvtier":
        tiers = {"g2": {"capacity": host // 2}, "g3": {"path": disk, "capacity": "4GiB"}}
        where = {"type": "KVTierSecondaryTier", "module_path": "kvtier.connectors.vllm.offloading"}
        yield _native(host - host // 2, {**where, "kvtier_config": {"tiers": tiers}, "lookup_deadline": "1s"})
    elif name == "lmcache":
        with _lmcache(contest, host, disk) as port:
            yield _connector("LMCacheMPConnector", None, **{"lmcache.mp.port": port})
    else:
        raise InvalidRequest(f"{name!r} is not a contender; known: {', '.join((*NAMES, *VARIANTS))}")


def _connector(kind: str, module: str | None, **extra: Any) -> dict[str, Any]:
    transfer = {"kv_connector": kind, "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    if module is not None:
        transfer["kv_connector_module_path"] = module
    return {"kv_transfer_config": {**transfer, "kv_connector_extra_config": extra}}


def _native(host: int, tier: Mapping[str, Any]) -> dict[str, Any]:
    return _connector(
        "KVTierOffloadingConnector",  # vLLM's OffloadingConnector with the engine's configuration for its tiers
        "kvtier.connectors.vllm.offloading",
        spec_name="CpuTieringSpec",
        spec_module_path="kvtier.connectors.vllm.offloading.cpu_spec",
        cpu_bytes_to_use=host,
        secondary_tiers=[dict(tier)],
    )


@contextmanager
def _lmcache(contest: Contest, host: int, disk: str) -> Iterator[int]:
    """LMCache's server on a free port of this machine."""
    if contest.lmcache is None:
        raise PeerFailed("LMCache is not installed here; give an interpreter that has it (--lmcache PYTHON)")
    port, http = free_ports(2)
    Path(disk).mkdir(exist_ok=True)
    adapter = {"type": "fs_native", "base_path": disk, "num_workers": 4, "use_odirect": True}
    command = [
        *ENVIRONMENT, str(contest.lmcache.with_name("lmcache")), "server", "--host", "localhost", "--port", str(port),
        "--http-host", "localhost", "--http-port", str(http), "--chunk-size", str(BLOCK_TOKENS),
        "--l1-size-gb", str(host / 2**30), "--eviction-policy", "LRU", "--supported-transfer-mode", "auto",
        "--l2-adapter", json.dumps(adapter), "--disable-observability",
    ]  # fmt: skip
    log = Path(disk).with_name("server.log").open("w")
    server = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        _until_listening(server, port, Path(log.name))
        yield port
    finally:
        server.terminate()
        end_process(server, grace_s=10.0)
        log.close()


def _until_listening(server: subprocess.Popen[Any], port: int, log: Path) -> None:
    until = time.monotonic() + 90
    while time.monotonic() < until:
        if server.poll() is not None:
            break
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise PeerFailed(f"LMCache's server does not answer: {error_in(log.read_text())}")


def replay(
    contest: Contest, name: str, more: Mapping[str, Any], prompts: Sequence[Sequence[int]], margins: bool = False
) -> Replay:
    """Run one engine over the prompts. Raises PeerFailed if it does not start, dies or stops answering."""
    return contest.run_engine(name, command(contest, name), job(contest, more, prompts, margins=margins))


def command(contest: Contest, name: str) -> list[str]:
    """Starts the engine of a contender, which reads its job."""
    interpreter = contest.lmcache if name == "lmcache" and contest.lmcache is not None else Path(sys.executable)
    return [str(interpreter), "-P", str(_ENGINE)]


def job(
    contest: Contest, more: Mapping[str, Any], prompts: Sequence[Sequence[int]] | None, **given: Any
) -> dict[str, Any]:
    """Of `vllm_engine`: the prompts for an engine with `more` arguments, None: they come one by one; what else is
    `given`."""
    switched = {name: value for name, value in more.items() if name != "control"}
    engine = {
        "model": str(contest.model), "skip_tokenizer_init": True, "dtype": "float32", "seed": 0,
        "max_model_len": BLOCK_TOKENS * (PROMPT_BLOCKS_MAX + 4), "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": contest.gpu_blocks, "gpu_memory_utilization": 0.2, "enforce_eager": True,
        "disable_log_stats": False, "max_num_batched_tokens": 512, "async_scheduling": False,
        "prefix_caching_hash_algo": "sha256_cbor", "distributed_executor_backend": "uni", **switched,
    }  # fmt: skip
    asked = {
        "prompts": None if prompts is None else [*map(list, prompts)],
        "tokens": OUTPUT_TOKENS,
        "control": more.get("control"),
    }
    return {"engine": engine, **asked, "margins": False, **given}
