"""What a vLLM engine with a small GPU pool still computes of a replayed conversation trace, by cache below it.

    nothing        the engine's own prefix cache alone
    kvtier         KVTierConnector over G2 and G3
    native         vLLM's tiered offloading: its host cache and its fs tier
    native+kvtier  vLLM's tiered offloading: its host cache, and kvtier as its tier
    lmcache        LMCache's server (MP) with its fs_native adapter, through LMCacheMPConnector

All have as much host memory and the same disk. A slice of the trace is replayed one request after another; then the
engine (and LMCache's server) end, start again, and the slice's last requests are asked once more. Each of the trace's
blocks of 512 tokens stands for one block of the engine, so that a small model on a CPU can follow. Every request's
tokens are compared with those of an engine without any cache.
"""

from __future__ import annotations

import json
import os
import random
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from kvtier.bench.retention.traces import Trace, load_trace
from kvtier.errors import InvalidRequest, KVTierError

BLOCK_TOKENS = 32
PROMPT_BLOCKS_MAX = 64
OUTPUT_TOKENS = 8
BLOCK_BYTES = 65_536
"""Of the small model below: 4 layers × K and V × 2 heads × 32 numbers × 4 bytes × 32 tokens."""
TIE = 1e-3
"""Tokens may differ from where the two best were closer than this in the engine without cache (log-probabilities)."""
START_S, REQUEST_S = 400.0, 60.0
NAMES = ("nothing", "kvtier", "native", "native+kvtier", "lmcache")
_ENGINE = Path(__file__).with_name("peers_engine.py")
_ENVIRONMENT = (
    "env", "HF_HUB_OFFLINE=1", "VLLM_LOGGING_LEVEL=ERROR", "OMP_NUM_THREADS=1", "VLLM_CPU_OMP_THREADS_BIND=nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING=0", "PYTHONHASHSEED=0", "LMCACHE_TRACK_USAGE=false", "LMCACHE_DISABLE_BANNER=1",
    "LMCACHE_LOG_LEVEL=ERROR",
)  # fmt: skip


class PeerFailed(KVTierError):
    """A contender could not be run; the message says what was tried and what happened."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One comparison. Sizes in blocks of the engine."""

    model: Path
    prompts: Sequence[Sequence[int]]
    gpu_blocks: int
    host_blocks: int
    folder: Path
    again: int = 30  # requests asked once more after the restart; 0: no restart
    lmcache: Path | None = None  # an interpreter that has vLLM and LMCache
    tell: Callable[[str, int], None] = field(default=lambda name, done: None)  # progress: contender, requests done


@dataclass(frozen=True, slots=True)
class Replay:
    """What one engine did with a list of prompts."""

    start_s: float
    seconds: float
    computed: int
    prompted: int
    tokens: list[list[int]]
    ttft_s: list[float]
    margins: list[list[float]]


# ── prompts ─────────────────────────────────────────────────────────────────────────────────────────────────────


def conversations(trace: Trace, requests: int, seed: int) -> list[list[int]]:
    """About `requests` requests of `trace` as lists of block ids: whole conversations drawn at random, in order of
    time. A conversation is what shares its first two blocks; the first alone many have as their system prompt. Pure."""
    rng = random.Random(seed)
    by_root: dict[tuple[int, ...], int] = {}
    for request in trace.requests:
        by_root.setdefault(tuple(request.blocks[:2]), len(by_root))
    order = list(range(len(by_root)))
    rng.shuffle(order)
    sizes = [0] * len(by_root)
    for request in trace.requests:
        sizes[by_root[tuple(request.blocks[:2])]] += 1
    kept: set[int] = set()
    count = 0
    for root in order:
        if count >= requests:
            break
        kept.add(root)
        count += sizes[root]
    return [list(r.blocks) for r in trace.requests if by_root[tuple(r.blocks[:2])] in kept]


def prompts_of(blocks: Sequence[Sequence[int]], vocabulary: int = 1000) -> list[list[int]]:
    """Token ids: every block id stands for the same run of tokens, wherever it comes; one more token at the end,
    since the last one of a prompt is computed in any case. Pure."""
    out = []
    for chain in blocks:
        tokens: list[int] = []
        for block in chain[:PROMPT_BLOCKS_MAX]:
            rng = random.Random(block)
            tokens += [rng.randrange(3, vocabulary) for _ in range(BLOCK_TOKENS)]
        out.append([*tokens, 5])
    return out


def sample() -> list[list[int]]:
    """The slice that comes with kvtier: 120 requests of the Mooncake conversation trace (FAST'25, Apache-2.0)."""
    file = resources.files("kvtier.bench.peers") / "conversation_slice.jsonl"
    return [json.loads(line)["hash_ids"] for line in file.read_text().splitlines()]


def slice_of(trace: Path | None, requests: int, seed: int) -> list[list[int]]:
    """The packaged slice, or one of `trace`. Raises InvalidRequest."""
    if trace is None:
        return sample()[:requests]
    return conversations(load_trace(trace), requests, seed)[:requests]


def reusable(blocks: Sequence[Sequence[int]]) -> list[int]:
    """Per request, how many leading blocks an endless cache would have of earlier ones. Pure."""
    seen: set[int] = set()
    out = []
    for chain in (list(chain[:PROMPT_BLOCKS_MAX]) for chain in blocks):
        out.append(next((i for i, block in enumerate(chain) if block not in seen), len(chain)))
        seen.update(chain)
    return out


def make_model(folder: Path) -> Path:
    """A small random Llama whose output depends on all of its prompt: with weights as narrow as usual greedy decoding
    runs into a short cycle whatever the KV holds, and wrong bytes would go unnoticed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=False, initializer_range=0.15,
    )  # fmt: skip
    LlamaForCausalLM(config).float().eval().save_pretrained(folder)
    return folder


# ── contenders ──────────────────────────────────────────────────────────────────────────────────────────────────


def compare(setting: Setting, names: Sequence[str] = NAMES) -> dict[str, Any]:
    """Figures per contender. Starts engines one after another; blocks for minutes. A contender that cannot be run has
    an entry that says why."""
    truth = _replay(setting, "oracle", {"enable_prefix_caching": False}, setting.prompts, margins=True)
    return contest(setting, names, truth, _transfer, _replay)


def contest(
    setting: Setting,
    names: Sequence[str],
    truth: Replay,
    arguments: Callable[[Setting, str, Path], AbstractContextManager[dict[str, Any]]],
    replay: Callable[[Setting, str, Mapping[str, Any], Sequence[Sequence[int]]], Replay],
) -> dict[str, Any]:
    """Figures per contender. `arguments` are the engine's that switch one on, in a directory of its own; `replay` runs
    an engine. A contender that cannot be run has an entry that says why."""
    out: dict[str, Any] = {"without_any_cache": _figures(setting, truth, truth)}
    for name in names:
        try:
            folder = setting.folder / name
            folder.mkdir(parents=True)
            with arguments(setting, name, folder) as more:
                first = replay(setting, name, more, setting.prompts)
            entry = _figures(setting, first, truth)
            if setting.again and name != "nothing":
                last = setting.prompts[-setting.again :]
                with arguments(setting, name, folder) as more:
                    second = replay(setting, name, more, last)
                entry["after_restart"] = _figures(setting, second, truth, len(setting.prompts) - len(last))
            out[name] = entry
        except PeerFailed as failure:
            out[name] = {"not_run": str(failure)}
        except KeyboardInterrupt:  # what was found in minutes is worth showing
            out |= {rest: {"not_run": "interrupted"} for rest in names if rest not in out}
            break
    return out


@contextmanager
def _transfer(setting: Setting, name: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Arguments of the engine that switch a contender on; what it needs beside the engine runs meanwhile."""
    host, disk = setting.host_blocks * BLOCK_BYTES, str(folder / "disk")
    if name == "nothing":
        yield {}
    elif name == "kvtier":
        tiers = {"g2": {"capacity": host}, "g3": {"path": disk, "capacity": "4GiB"}}
        yield _connector(
            "KVTierConnector",
            "kvtier.connectors.vllm",
            kvtier_config={"tiers": tiers},
            lookup_deadline="1s",
            recompute="never",  # a model this small computes faster than any disk reads
        )
    elif name == "native":
        yield _native(host, {"type": "fs", "root_dir": disk, "n_read_threads": 4, "n_write_threads": 4})
    elif name == "native+kvtier":
        tiers = {"g2": {"capacity": host // 2}, "g3": {"path": disk, "capacity": "4GiB"}}
        where = {"type": "KVTierSecondaryTier", "module_path": "kvtier.connectors.vllm.offloading"}
        yield _native(host - host // 2, {**where, "kvtier_config": {"tiers": tiers}, "lookup_deadline": "1s"})
    elif name == "lmcache":
        with _lmcache(setting, host, disk) as port:
            yield _connector("LMCacheMPConnector", None, **{"lmcache.mp.port": port})
    else:
        raise InvalidRequest(f"{name!r} is not a contender; known: {', '.join(NAMES)}")


def _connector(kind: str, module: str | None, **extra: Any) -> dict[str, Any]:
    transfer = {"kv_connector": kind, "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    if module is not None:
        transfer["kv_connector_module_path"] = module
    return {"kv_transfer_config": {**transfer, "kv_connector_extra_config": extra}}


def _native(host: int, tier: Mapping[str, Any]) -> dict[str, Any]:
    return _connector(
        "KVTierOffloadingConnector",  # vLLM's OffloadingConnector, which tells tiers what the engine runs
        "kvtier.connectors.vllm.offloading",
        spec_name="CpuTieringSpec",
        spec_module_path="kvtier.connectors.vllm.offloading.cpu_spec",
        cpu_bytes_to_use=host,
        secondary_tiers=[dict(tier)],
    )


@contextmanager
def _lmcache(setting: Setting, host: int, disk: str) -> Iterator[int]:
    """LMCache's server on a free port of this machine."""
    if setting.lmcache is None:
        raise PeerFailed("LMCache is not installed here; give an interpreter that has it (--lmcache PYTHON)")
    port, http = _free_port(), _free_port()
    Path(disk).mkdir(exist_ok=True)
    adapter = {"type": "fs_native", "base_path": disk, "num_workers": 4, "use_odirect": True}
    command = [
        *_ENVIRONMENT, str(setting.lmcache.with_name("lmcache")), "server", "--host", "localhost", "--port", str(port),
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
        _end(server)
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
    raise PeerFailed(f"LMCache's server does not answer: {_tail(log.read_text())}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ── engines ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _replay(
    setting: Setting,
    name: str,
    more: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    margins: bool = False,
) -> Replay:
    """Run one engine over the prompts. Raises PeerFailed if it does not start, dies or stops answering."""
    engine = {
        "model": str(setting.model), "skip_tokenizer_init": True, "dtype": "float32", "seed": 0,
        "max_model_len": BLOCK_TOKENS * (PROMPT_BLOCKS_MAX + 4), "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": setting.gpu_blocks, "gpu_memory_utilization": 0.2, "enforce_eager": True,
        "disable_log_stats": False, "max_num_batched_tokens": 512, "async_scheduling": False,
        "prefix_caching_hash_algo": "sha256_cbor", "distributed_executor_backend": "uni", **more,
    }  # fmt: skip
    asked = {
        "engine": engine,
        "prompts": [list(prompt) for prompt in prompts],
        "tokens": OUTPUT_TOKENS,
        "margins": margins,
    }
    interpreter = setting.lmcache if name == "lmcache" and setting.lmcache is not None else Path(sys.executable)
    return run_engine(setting, name, [str(interpreter), "-P", str(_ENGINE)], asked, len(prompts))


def run_engine(setting: Setting, name: str, command: Sequence[str], asked: Mapping[str, Any], count: int) -> Replay:
    """Run a program that replays what it is told on standard input and says so in JSON lines, as peers_engine does.
    Raises PeerFailed."""
    errors = setting.folder / f"{name}.log"
    with errors.open("a") as log:
        child = subprocess.Popen(
            [*_ENVIRONMENT, *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(json.dumps(asked).encode())
            child.stdin.close()
            return _collect(setting, name, child.stdout, count)
        except (TimeoutError, EOFError) as failure:
            raise PeerFailed(f"the engine {failure}: {_tail(errors.read_text())}") from None
        finally:
            _end(child, grace_s=30.0)


def _collect(setting: Setting, name: str, stream: Any, count: int) -> Replay:
    lines = _lines(stream)
    ready = next(lines)
    began = time.monotonic()
    outs = []
    for _ in range(count):
        outs.append(next(lines))
        setting.tell(name, len(outs))
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


def _end(process: subprocess.Popen[Any], grace_s: float = 10.0) -> None:
    """End a process and all that it started, in good order if it goes of itself in time."""
    try:
        if grace_s < 30.0:
            process.terminate()
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _tail(text: str) -> str:
    """The last thing that a log says, without what changes from run to run."""
    text = text.partition("Exception ignored in")[0]  # what an interpreter says at its end comes after the cause
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "error:" in line]
    return (telling or lines or ["it said nothing"])[-1][-300:]


# ── figures ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _figures(setting: Setting, run: Replay, truth: Replay, start: int = 0) -> dict[str, Any]:
    differing, excused = differences(run.tokens, truth.tokens[start:], truth.margins[start:])
    return {
        "requests": len(run.tokens),
        "prompt_tokens": run.prompted,
        "computed_prompt_tokens": run.computed,
        "computed_share": run.computed / run.prompted,
        "ttft_ms_median": 1e3 * statistics.median(run.ttft_s),
        "ttft_ms_p90": 1e3 * sorted(run.ttft_s)[int(0.9 * (len(run.ttft_s) - 1))],
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
