"""The state of an engine and of the connector in it: a part of engine_host.Host, in the engine's process."""

from __future__ import annotations

import time
from dataclasses import asdict
from hashlib import sha256
from typing import Any


class Insides:
    """Looks into the connector's two halves (`half`, `worker`), the tiers (`cache`) and the engine's `core`."""

    llm: Any
    core: Any
    connector: Any
    half: Any
    worker: Any
    cache: Any
    _batches: list[Any]
    _calls: list[list[Any]]
    _waits: list[float]
    _faults: dict[str, Any]
    _forgotten: Any

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
            "storing": len(self.half._stores._storing) + len(getattr(self.half, "_boundaries", None) or ()),
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

    def contents(self, name: str, blocks: int) -> list[str]:
        """Digests of a running request's first blocks in the engine's cache."""
        from torch import uint8

        every = self.worker._described.memory.owners
        return [
            sha256(b"".join(tensor[block].contiguous().view(uint8).numpy().tobytes() for tensor in every)).hexdigest()
            for block in self._track(name).table[:blocks]
        ]

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

    def has_cache(self) -> bool:
        return self.half is not None

    def unfinished(self) -> list[str]:
        """Names of requests that have not ended."""
        return [key.rpartition("-")[0] for key in self.half._requests]

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

    def places(
        self, prompt: list[int], salt: str | None = None, adapter: list[Any] | None = None
    ) -> dict[str, list[bool]]:
        """Which blocks of a prompt are in the engine's own cache, in G2 and in G3."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.v1.request import Request

        from kvtier.identity.keys import make_keys

        request = Request(
            request_id="probe",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            lora_request=LoRARequest(*adapter) if adapter else None,
            cache_salt=salt,
            block_hasher=self.core.request_block_hasher,
        )
        pool, manager = self.core.scheduler.kv_cache_manager.block_pool, self.cache.manager
        keys = make_keys(self.half._reader.read(request)[1], [bytes(digest) for digest in request.block_hashes])
        g3, wanted_by = manager.lower["g3"], time.monotonic() + 5
        return {
            "g1": [pool.get_cached_block(digest, [0]) is not None for digest in request.block_hashes],
            "g2": [manager.prefix([key]) == 1 for key in keys],
            "g3": [self.cache.submit(g3.lookup([key], [0], wanted_by)).result(5) == [None] for key in keys],
        }

    def purge(self, salt: str) -> int:
        return int(self.cache.purge(salt=salt))

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
