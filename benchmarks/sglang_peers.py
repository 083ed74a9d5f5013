"""What kvtier costs and saves below SGLang, and HiCacheFile beside it. Runs with SGLang's interpreter (`make sglang`).

    overhead   nothing is ever found and everything is stored, the worst case: two engines, one with and one without
               kvtier, are asked the same new prompts in turn; medians of the pairs' ratios
    trace      a slice of a conversation trace over a small device pool: prompt tokens left to prefill without kvtier,
               with RAM, and with RAM and disk; the engines take each request in turn
    storage    the same slice as HiCache would bring it to its storage: SGLang's HiCacheFile and kvtier's HiCacheStorage
               over the same host pool, with the same bytes on disk. HiCache itself does not start without CUDA (its
               host pool is page-locked), so no engine takes part.

One block of 512 trace tokens is one page of 16 here, so that a tiny model can follow; tokens are a function of the
block's id. Everything on two cores of a CPU, greedy, float32.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "sglang"))

PAGE = 16
Below = dict[str, dict[str, Any] | None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("overhead", "trace", "storage"))
    parser.add_argument("--trace", type=Path, help="requests with hash_ids, one JSON object per line")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--pool-pages", type=int, default=256, help="G1 of the engine")
    parser.add_argument("--ram-pages", type=int, default=512, help="G2")
    parser.add_argument("--disk-pages", type=int, default=8192, help="G3")
    parser.add_argument("--save", type=Path, help="directory for the result")
    args = parser.parse_args()
    result = {"what": args.what, "results": {"overhead": overhead, "trace": trace, "storage": storage}[args.what](args)}
    result["machine"] = {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    result["commit"] = head.stdout.strip()
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    result["command"] = " ".join(["python", "benchmarks/sglang_peers.py", *words])
    text = json.dumps(result, indent=2)
    print(text)
    if args.save:
        (args.save / f"sglang_{args.what}.json").write_text(text + "\n")


# ── engines ─────────────────────────────────────────────────────────────────────────────────────────────────────


def make_model(folder: Path, layers: int, hidden: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=max(1, hidden // 256), head_dim=64,
        max_position_embeddings=8192, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).float().eval().save_pretrained(folder)


def block_bytes(args: argparse.Namespace) -> int:
    return args.layers * 2 * PAGE * max(1, args.hidden // 256) * 64 * 4


def tiers(args: argparse.Namespace, disk: Path | None) -> dict[str, Any]:
    size = block_bytes(args)
    below = {"g3": {"path": str(disk), "capacity": str(args.disk_pages * size)}} if disk is not None else {}
    return {"g2": {"capacity": str(args.ram_pages * size)}, **below}


@contextmanager
def engines(
    args: argparse.Namespace, folder: Path, below: dict[str, dict[str, Any] | None]
) -> Iterator[dict[str, Any]]:
    """One engine per entry of `below`: kvtier's tiers, or None for SGLang alone."""
    from engine_process import EngineHost

    make_model(folder / "model", args.layers, args.hidden)
    running: dict[str, Any] = {}
    try:
        for name, config in below.items():
            arguments: dict[str, Any] = {
                "model_path": str(folder / "model"),
                "max_total_tokens": args.pool_pages * PAGE,
                "page_size": PAGE,
                "max_running_requests": 8,
            }
            if config is not None:
                extra = {"kvtier_config": {"version": 1, "tiers": config}, "recompute": "never"}
                arguments |= {
                    "enable_unified_cache_external_linker": True,
                    "unified_cache_external_linker_backend": "dynamic",
                    "unified_cache_external_linker_config": {
                        "linker": "KVTierLinker",
                        "linker_module_path": "kvtier.connectors.sglang",
                        "linker_extra_config": extra,
                    },
                }
            running[name] = EngineHost(arguments)
        yield running
    finally:
        for host in running.values():
            host.close()


def timed(host: Any, prompt: list[int], new: int) -> dict[str, Any]:
    (answer,) = host.generate(prompt, new=new)
    return dict(answer)


# ── what it costs ───────────────────────────────────────────────────────────────────────────────────────────────


def overhead(args: argparse.Namespace) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="kvtier-peers-"))
    try:
        (folder / "g3").mkdir()
        below = {"plain": None, "kvtier": tiers(args, folder / "g3")}
        with engines(args, folder, below) as running:
            return {
                "prefill": _pairs(args, running, new=1, seed=0),
                "prefill_and_decode": _pairs(args, running, new=args.output_tokens, seed=1_000_000),
                "block_bytes": block_bytes(args),
            }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _pairs(args: argparse.Namespace, running: dict[str, Any], new: int, seed: int) -> dict[str, Any]:
    ratios, seconds = [], {name: [] for name in running}
    for turn in range(args.pairs + 5):
        prompt = tokens_of([seed + turn * 10_000 + page for page in range(args.prompt_tokens // PAGE)])
        order = list(running) if turn % 2 else list(running)[::-1]
        took = {}
        for name in order:
            answer = timed(running[name], prompt, new)
            assert answer["cached"] == 0, "every prompt is new"
            took[name] = answer["seconds"]
        if turn >= 5:  # the first ones warm up
            ratios.append(took["kvtier"] / took["plain"])
            for name, value in took.items():
                seconds[name].append(value)
    ordered = sorted(ratios)
    return {
        "prompt_tokens": args.prompt_tokens,
        "output_tokens": new,
        "pairs": args.pairs,
        "plain_ms_median": 1e3 * statistics.median(seconds["plain"]),
        "kvtier_ms_median": 1e3 * statistics.median(seconds["kvtier"]),
        "ratio_median": statistics.median(ratios),
        "ratio_quartiles": [ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4]],
    }


# ── what it saves ───────────────────────────────────────────────────────────────────────────────────────────────


def tokens_of(blocks: list[int]) -> list[int]:
    """One page of tokens per block, a function of its id."""
    return [(block * 7919 + i * 104729 + (block >> 7) * 31 + 13) % 1000 + 3 for block in blocks for i in range(PAGE)]


def requests_of(args: argparse.Namespace, most_pages: int) -> list[list[int]]:
    """Block ids of the first requests that fit into the device pool."""
    found: list[list[int]] = []
    with args.trace.open() as lines:
        for line in lines:
            blocks = json.loads(line)["hash_ids"]
            if 0 < len(blocks) <= most_pages:
                found.append(blocks)
            if len(found) == args.requests:
                break
    return found


def trace(args: argparse.Namespace) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="kvtier-peers-"))
    try:
        (folder / "g3").mkdir()
        below = {"plain": None, "ram": tiers(args, None), "ram_and_disk": tiers(args, folder / "g3")}
        wanted = requests_of(args, args.pool_pages // 2)
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in below}
        with engines(args, folder, below) as running:
            for blocks in wanted:
                prompt = [*tokens_of(blocks), 7]  # the last token is always computed
                for name, host in running.items():
                    answers[name].append(timed(host, prompt, new=1))
        same = [len({tuple(answers[name][i]["tokens"]) for name in below}) == 1 for i in range(len(wanted))]
        prompt_tokens = sum(len(blocks) * PAGE + 1 for blocks in wanted)
        return {
            "requests": len(wanted),
            "prompt_tokens": prompt_tokens,
            "distinct_pages": len({block for blocks in wanted for block in blocks}),
            "pages": {"g1": args.pool_pages, "g2": args.ram_pages, "g3": args.disk_pages},
            "left_to_prefill": {name: prompt_tokens - sum(a["cached"] for a in answers[name]) for name in below},
            "from_below_g1": {name: sum(a["host"] for a in answers[name]) for name in below},
            "seconds": {name: sum(a["seconds"] for a in answers[name]) for name in below},
            "ms_median": {name: 1e3 * statistics.median(a["seconds"] for a in answers[name]) for name in below},
            "same_first_token": sum(same) / len(same),
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ── HiCache's storage ───────────────────────────────────────────────────────────────────────────────────────────


def storage(args: argparse.Namespace) -> dict[str, Any]:
    import cpu_site

    cpu_site.install()
    folder = Path(tempfile.mkdtemp(prefix="kvtier-peers-"))
    try:
        pool = _host_pool(args)
        wanted = requests_of(args, args.pool_pages // 2)
        chains = [_hashes(blocks) for blocks in wanted]
        made = {"hicache_file": _hicache_file(args, pool, folder), "kvtier": _kvtier(args, pool, folder)}
        out: dict[str, Any] = {name: {"hit_pages": 0, "exists_s": 0.0, "get_s": 0.0, "set_s": 0.0} for name in made}
        for turn, chain in enumerate(chains):
            for name in list(made) if turn % 2 else list(made)[::-1]:
                made[name](chain, out[name])
        for entry in out.values():
            entry["set_MB_s"] = entry.pop("set_bytes") / entry["set_s"] / 1e6
            entry["get_MB_s"] = entry.pop("get_bytes") / entry["get_s"] / 1e6 if entry["get_s"] else 0.0
        return {
            "requests": len(wanted),
            "pages_asked": sum(len(chain) for chain in chains),
            "page_bytes": block_bytes(args),
            "disk_pages": args.disk_pages,
            "layout": "page_first",
            **out,
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _host_pool(args: argparse.Namespace) -> Any:
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    tokens = args.pool_pages * PAGE
    device = MHATokenToKVPool(
        size=tokens, page_size=PAGE, dtype=torch.float32, head_num=max(1, args.hidden // 256), head_dim=64,
        layer_num=args.layers, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    (info,) = device.get_device_pool_infos()
    pool = MHATokenToKVPoolHost(
        info.buffer_info, 1.0, 0, PAGE, "page_first", pin_memory=False, device="cpu", device_capacity_tokens=tokens,
        start_layer=0, end_layer=args.layers, host_token_capacity=tokens,
    )  # fmt: skip
    pool.kv_buffer.normal_()
    return pool


def _hashes(blocks: list[int]) -> list[str]:
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    return list(get_storage_hash_str(RadixKey(tokens_of(blocks)), None, page_size=PAGE))


Turn = Callable[[list[str], dict[str, Any]], None]


def _turn(
    pool: Any, exists: Callable[[list[str]], int], get: Callable[[list[str], Any], int],
    put: Callable[[list[str], Any, list[str]], int],
) -> Turn:  # fmt: skip
    """One request as HiCache makes it: what is there comes into the host pool, the rest is written from it."""
    import torch

    def turn(chain: list[str], out: dict[str, Any]) -> None:
        indices = torch.arange(len(chain) * PAGE)
        size = sum(pool.get_page_buffer_meta(torch.arange(PAGE))[1])
        began = time.perf_counter()
        found = exists(chain)
        out["exists_s"] += time.perf_counter() - began
        began = time.perf_counter()
        hit = get(chain[:found], indices[: found * PAGE]) if found else 0
        out["get_s"] += time.perf_counter() - began
        began = time.perf_counter()
        stored = put(chain[hit:], indices[hit * PAGE :], chain[:hit]) if hit < len(chain) else 0
        out["set_s"] += time.perf_counter() - began
        out["hit_pages"] += hit
        out["get_bytes"] = out.get("get_bytes", 0) + hit * size
        out["set_bytes"] = out.get("set_bytes", 0) + stored * size

    return turn


def _config(args: argparse.Namespace, extra: dict[str, Any]) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    return HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=True, model_name="tiny", extra_config=extra,
    )  # fmt: skip


def _hicache_file(args: argparse.Namespace, pool: Any, folder: Path) -> Turn:
    """As SGLang's cache controller drives it: pages are copied through tensors."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    capacity = args.disk_pages * block_bytes(args)
    store = HiCacheFile(_config(args, {"max_size": capacity}), str(folder / "hicache"))
    store.register_mem_pool_host(pool)

    def get(keys: list[str], indices: Any) -> int:
        pages = store.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys]) or []
        done = 0
        for page, start in zip(pages, indices[::PAGE].tolist(), strict=False):
            if page is None:
                break
            pool.set_from_flat_data_page(start, page)
            done += 1
        return done

    def put(keys: list[str], indices: Any, before: list[str]) -> int:
        pages = [pool.get_data_page(start) for start in indices[::PAGE].tolist()]
        return len(keys) if store.batch_set(keys, pages) else 0

    return _turn(pool, store.batch_exists, get, put)


def _kvtier(args: argparse.Namespace, pool: Any, folder: Path) -> Turn:
    from types import SimpleNamespace

    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

    from kvtier.connectors import sglang_storage as module

    server = SimpleNamespace(
        model_path="hub/tiny", revision=None, speculative_algorithm=None, load_format="auto", quantization=None,
        json_model_override_args="{}", quantization_param_path=None,
    )  # fmt: skip
    text = SimpleNamespace(rope_theta=1e4, rope_scaling=None, rope_parameters=None)
    module.running_engine = lambda: (server, SimpleNamespace(hf_text_config=text, dtype=pool.dtype))
    (folder / "g3").mkdir()
    extra = {
        "interface_v1": 1, "hicache_storage_pass_prefix_keys": True, "weights": "1", "recompute": "never",
        "kvtier_config": {"version": 1, "tiers": tiers(args, folder / "g3")},
    }  # fmt: skip
    store = module.KVTierStorage(_config(args, extra))
    store.register_mem_pool_host(pool)

    def get(keys: list[str], indices: Any) -> int:
        return sum(store.batch_get_v1(keys, indices))

    def put(keys: list[str], indices: Any, before: list[str]) -> int:
        return sum(store.batch_set_v1(keys, indices, HiCacheStorageExtraInfo(prefix_keys=before)))

    return _turn(pool, store.batch_exists, get, put)


if __name__ == "__main__":
    main()
