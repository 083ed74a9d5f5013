"""What KV events of a request of 32,768 tokens cost SGLang's scheduler: kvtier's, and beside them the tree's own.

    .venv-sglang/bin/python benchmarks/sglang_events.py --save benchmarks/results

The scheduler's thread names a request's pages once (`naming`: of a salt's pages a chain of hashes of their own, with
an adapter's another hash of each), and makes an event of them for each tier that has stored them (`telling`, of G2).
`again` is a request for pages that are named already. `tree`: SGLang's own recorder, which hashes and tells of the same
pages when they enter the tree. Milliseconds of processor time of that thread, medians, without an engine; the prompts
are all new.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvtier.bench.record import record, save
from kvtier.testing import sglang_cpu

TOKENS, PAGES = 32768, (16, 64)
LABELS = {"none": (None, None), "salt": ("tenant", None), "adapter": (None, "ab" * 16), "both": ("tenant", "ab" * 16)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    sglang_cpu.install()
    results = {str(page): {name: costs(page, *LABELS[name], args.requests) for name in LABELS} for page in PAGES}
    entry = record("sglang_events", ["python", *sys.argv], {"tokens": TOKENS, "ms_by_page_tokens": results})
    print(json.dumps(entry, indent=2))
    if args.save:
        save(entry, args.save)


def costs(page: int, salt: str | None, adapter: str | None, requests: int) -> dict[str, float]:
    """Medians of requests with these labels."""
    from sglang.srt.mem_cache.utils import storage_namespace_seed

    from kvtier.connectors.sglang import adapters
    from kvtier.connectors.sglang.events import PageEvents
    from kvtier.connectors.sglang.page_names import page_hashes
    from kvtier.identity.keys import SHARED, make_keys, scope_of

    if adapter is not None:
        adapters._public[adapter] = "tuned"
    events, rng = PageEvents(page), random.Random(page)
    scope = SHARED if salt is adapter is None else scope_of(salt, b"" if adapter is None else b"tuned")
    took: dict[str, list[float]] = {}
    for number in range(requests + 2):
        req = SimpleNamespace(
            rid=str(number), cache_salt=salt, extra_key=adapter, lora_id=adapter, sampling_params=None,
            origin_input_ids=array("q", (rng.randrange(1 << 17) for _ in range(TOKENS))), output_ids=array("q"),
            session_id=None,
        )  # fmt: skip
        pages = page_hashes(bytes.fromhex(storage_namespace_seed(adapter, salt) or ""), req.origin_input_ids, page)
        chain = make_keys(scope, pages)
        seconds = {
            "naming": timed(lambda req=req, chain=chain: events.remember(req, chain, 0)),
            "again": timed(lambda req=req, chain=chain: events.remember(req, chain, 0)),
        }
        events.events.of("g2")(chain, True)
        seconds["telling"] = timed(lambda chain=chain: check(list(events.take()), len(chain)))
        seconds["tree"] = timed(lambda req=req, pages=pages: recorded(req, pages, page))
        for name, value in seconds.items() if number > 1 else ():  # the first ones warm up
            took.setdefault(name, []).append(1e3 * value)
    return {name: round(statistics.median(values), 2) for name, values in took.items()}


def check(told: list[Any], blocks: int) -> None:
    assert [len(event.block_hashes) for event in told] == [blocks]


def recorded(req: Any, pages: list[str], page: int) -> None:
    """As SGLang's tree tells of a new node with these pages."""
    from sglang.srt.mem_cache.events import KVCacheEventRecorder, KvEventLoraNames
    from sglang.srt.mem_cache.radix_cache import RadixKey

    names = KvEventLoraNames()
    names.register(req, "tuned")
    recorder = KVCacheEventRecorder(enabled=True, page_size=page, lora_names=names)
    empty = RadixKey(array("q"), req.extra_key, cache_salt=req.cache_salt)
    root = SimpleNamespace(key=empty, parent=None, hash_value=[], event_hash_value=None)
    key = RadixKey(req.origin_input_ids, req.extra_key, cache_salt=req.cache_salt)
    hashes = [name.hex() for name in pages]  # the tree has them at that time, for kvtier's lookup
    recorder.record_store(SimpleNamespace(key=key, parent=root, hash_value=hashes, event_hash_value=None))
    check(recorder.take(), len(pages))


def timed(act: Callable[[], Any]) -> float:
    began = time.thread_time()
    act()
    return time.thread_time() - began


if __name__ == "__main__":
    main()
