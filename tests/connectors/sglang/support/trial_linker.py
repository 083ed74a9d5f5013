"""A KVTierLinker for tests: with faults in its lower tiers or in what it loads, a witness of its bytes, and a port that
takes orders."""

from __future__ import annotations

import json
import socketserver
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bit_compare import Witness  # beside this file
from sglang.srt.mem_cache.utils import storage_namespace_seed
from state_kernels import mend as mend_states
from window_attention import mend

import kvtier
from kvtier.clock import SystemClock
from kvtier.connectors.identity import engine_keys
from kvtier.connectors.sglang import KVTierLinker, adapters, refusals
from kvtier.connectors.sglang.copies import PageCopies
from kvtier.connectors.sglang.identity import process_number
from kvtier.connectors.sglang.page_names import page_hashes
from kvtier.connectors.sglang.pool import place_of
from kvtier.identity.keys import SHARED, BlockKey
from kvtier.identity.namespace import Namespace
from kvtier.manager.build import lower_tiers
from kvtier.testing import Fault, FaultyTier


class TrialLinker(KVTierLinker):
    """`linker_extra_config` has more keys. `control`: a TCP port of rank 0 (rank r has the port r above it), where a
    line {"do": verb, …} is answered by a line of JSON; verbs are the methods `do_…`. `witness`: a file for a Witness
    (rank r has r in its name) that engines may have in common. `can_fail`: false for tiers without faults; those with
    them do not keep what their blocks hold."""

    def __init__(self, *arguments: Any, extra_config: dict[str, Any], **named: Any) -> None:
        mend()
        mend_states()
        refusals._refuse_unproved = lambda *_: None  # the long tests are to prove it
        port, witness = int(extra_config.pop("control")), extra_config.pop("witness")
        self._can_fail = extra_config.pop("can_fail", True)
        self._witness_file = witness
        self._witness: Witness | None = None
        self._loading: dict[str, list[bytes]] = {}  # names of the blocks that a request waits for
        self._flying: dict[int, list[tuple[list[bytes], list[int]]]] = {}
        self._faulty: dict[str, FaultyTier] = {}
        self._scramble: bool | str = False
        self._refuse = self._lose = False
        super().__init__(*arguments, extra_config=extra_config, **named)
        if self._pool.states:
            self._look_at_states()
        self._listen(port + process_number())

    def open_cache(self, namespace: Namespace) -> kvtier.Cache:
        if not self._can_fail:
            return super().open_cache(namespace)
        config, clock = self._settings.config, SystemClock()
        tiers = [FaultyTier(tier, seed=7) for tier in lower_tiers(config, namespace, clock)]
        self._faulty = {tier.name: tier for tier in tiers}
        return kvtier.open(config, namespace, tiers=tiers)

    def _open(self, namespace: Namespace) -> PageCopies:
        pages = super()._open(namespace)
        witness = self._witness = self._witness or Witness(self._pool, Path(f"{self._witness_file}.{process_number()}"))
        offload = pages.offload

        def watched(
            chain: Sequence[bytes], start: int, numbers: Sequence[int], terms: Any, boundary: Any = None
        ) -> None:
            witness.computed([namespace.digest + key for key in chain[start : start + len(numbers)]], numbers)
            if boundary is not None:
                witness.computed([namespace.digest + key for key in boundary.keys], boundary.blocks)
            offload(chain, start, numbers, terms, boundary)

        pages.offload = watched
        return pages

    def _look_at_states(self) -> None:
        """A request's forward changes the state that was loaded for it: the witness sees it when the first layer of
        states comes to wait for its own, before it runs."""
        ordered = self.layer_done_counter.on_layer_ready
        first = next(layer for layer in range(self._pool.depth) if (1, None) in self._pool.place(layer))

        def ready(index: int, layer: int) -> None:
            ordered(index, layer)
            for names, blocks in self._flying.get(index, ()) if layer == first else ():
                loaded = [pair for pair in zip(names, blocks, strict=True) if place_of(pair[1])[0]]
                for pair in loaded:
                    names.remove(pair[0])
                    blocks.remove(pair[1])
                if loaded:
                    assert self._witness is not None
                    self._witness.restored(*zip(*loaded, strict=True))

        self.layer_done_counter.on_layer_ready = ready

    # ── orders, on a thread of their own ────────────────────────────────────────────────────────────────────

    def _listen(self, port: int) -> None:
        linker = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                order = json.loads(self.rfile.readline())
                try:
                    answer = getattr(linker, f"do_{order.pop('do')}")(**order)
                except Exception as error:
                    answer = {"error": f"{type(error).__name__}: {error}"}
                self.wfile.write(json.dumps(answer).encode() + b"\n")

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True

        server = Server(("127.0.0.1", port), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()

    @property
    def _cache(self) -> kvtier.Cache:
        assert self._pages is not None, "the cache is being replaced"
        return self._pages.cache

    def do_steer(
        self, faults: dict[str, list[list[Any]]] | None = None, scramble: bool | str = False, refuse: bool = False,
        lose: bool = False,
    ) -> None:  # fmt: skip
        """From now on: `faults[tier]` are [verb, kind, rate, times, seconds]; `scramble` damages bytes between their
        check and the device ("chain" or "window", which is states, too: only those), `refuse` refuses loads, `lose`
        lets loads fail after their start."""
        for name, tier in self._faulty.items():
            tier.faults = [Fault(*fault) for fault in (faults or {}).get(name, [])]
        self._scramble, self._refuse, self._lose = scramble, refuse, lose

    def do_evict(self, tier: str) -> int:
        return self._cache.evict(tier)

    def do_purge(self, salt: str) -> int:
        return int(self._cache.purge(salt))

    def do_places(self, tokens: list[int], salt: str | None, adapter: str | None) -> dict[str, list[bool]]:
        """Which pages of a prompt are in G2 and in G3, with this salt and the adapter of this name."""
        page, g3 = self._pool.page, self._cache.manager.lower["g3"]
        number = next((number for number, name in adapters._public.items() if name == adapter), None)
        labelled = SimpleNamespace(cache_salt=salt, extra_key=number, lora_id=number)
        scope = self._requests.control_of(labelled)[1]
        assert scope is not None
        pages = page_hashes(bytes.fromhex(storage_namespace_seed(number, salt) or ""), tokens, page)
        wanted_by, keys = self._cache.manager.hierarchy.clock.monotonic() + 5, engine_keys(scope, pages)
        return {
            "g2": [self._cache.manager.prefix([key]) == 1 for key in keys],
            "g3": [self._cache.submit(g3.lookup([key], [0], wanted_by)).result(5) == [None] for key in keys],
        }

    def _chain(self, tokens: list[int]) -> list[BlockKey]:
        """The blocks of a prompt without salt."""
        return engine_keys(SHARED, page_hashes(b"", tokens, self._pool.page))

    def do_boundaries(self, tokens: list[int]) -> list[int]:
        """Depths of a prompt at which all blocks of windows or states are in G2."""
        chain, manager = self._chain(tokens), self._cache.manager
        return [depth for depth in range(1, len(chain) + 1) if self._beside.holds(manager, chain, depth)]

    def _some(self, tokens: list[int], depth: int, group: str) -> list[BlockKey]:
        """Of the blocks of windows or states at a depth of a prompt all ("windows") or the last, or the chain's block
        there ("full")."""
        chain = self._chain(tokens)
        beside = self._beside.keys(chain, depth)
        return {"full": [chain[depth - 1]], "windows": beside, "last": beside[-1:]}[group]

    def do_drop(self, tokens: list[int], depth: int, group: str) -> int:
        """Evict blocks of one group from every tier. Returns how many copies there were."""
        keys, manager = self._some(tokens, depth, group), self._cache.manager
        dropped = sum(manager.host.drop_where(lambda number: manager.host.index.table.keys[number] in set(keys)))
        for tier in manager.lower.values():
            dropped += self._cache.submit(tier.evict(keys)).result(20)
        return dropped

    def do_damage(self, folder: str, tokens: list[int], depth: int, group: str) -> int:
        """Flip a byte on disk of one block, which is in G2. Returns in how many places its bytes were found."""
        key, found = self._some(tokens, depth, group)[-1], 0
        sample = bytes(self._cache.manager.host.index.get(key).pieces[0][:64])
        for path in (path for path in Path(folder).rglob("*") if path.is_file() and path.suffix != ".mdb"):
            content = path.read_bytes()
            place = content.find(sample)
            while place >= 0:
                found += 1
                with path.open("r+b") as file:
                    file.seek(place + 17)
                    file.write(bytes([content[place + 17] ^ 0xFF]))
                place = content.find(sample, place + 64)
        return found

    def do_flush(self, timeout: float = 60.0) -> int:
        """Returns the blocks that are still on their way down."""
        return self._cache.flush(timeout).pending

    def do_stats(self) -> dict[str, Any]:
        return self.stats()

    def do_check(self) -> dict[str, int]:
        """Invariants, and what must be zero when the engine is idle."""
        self._cache.flush(10)
        self._cache.check()
        assert self._pages is not None
        g2 = self._cache.stats()["g2"]
        held = {"requests": len(self._requests), "loads": len(self._loads), "offloads": self._pages.outstanding()}
        wrong = {"other_blocks": self._witness.counts["other_blocks"]} if self._witness is not None else {}
        return {**held, "pinned": g2["pinned"], "quarantined": g2["quarantined"], **wrong}

    def do_witness(self) -> dict[str, int]:
        """How many blocks came back as they were computed, and how many did not, since the last time."""
        assert self._witness is not None
        counts, self._witness.counts = self._witness.counts, Counter(same_blocks=0, other_blocks=0)
        return dict(counts)

    def do_namespace(self) -> dict[str, Any]:
        return dict(self._rotation.namespace.fields())

    # ── what orders change ──────────────────────────────────────────────────────────────────────────────────

    def _pinned(self, rid: str, transfers: Any) -> Any:
        return None if self._refuse else super()._pinned(rid, transfers)

    def load(self, rid: str, transfers: Any) -> bool:
        queued = super().load(rid, transfers)
        if queued:
            wanted, digest = self._loads._queue[-1], self._rotation.namespace.digest
            self._loading[rid] = [digest + slot.key for _, slot in wanted.copies()]
            chain = wanted.lease.slots
            window = [slot for _, slot in wanted.boundary.copies] if wanted.boundary is not None else []
            wrong = {"chain": chain, "window": window, True: [*chain, *window]}
            for slot in wrong.get(self._scramble, ()):
                half = len(slot.pieces[0]) // 2
                slot.pieces[0][:half] = bytes(slot.pieces[0][half:])
        return queued

    def start_layer_wise_loading(self) -> int:
        queue = [
            (self._loading.pop(wanted.rid), [block for block, _ in wanted.copies()]) for wanted in self._loads._queue
        ]
        if self._lose and queue:
            assert self._pages is not None
            self._pages._engine.load = _lost
            try:
                return super().start_layer_wise_loading()
            finally:
                del self._pages._engine.load
        index = super().start_layer_wise_loading()
        if queue:
            self._flying[index] = queue
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        landed = super().finish_layer_wise_loading(counter_index)
        for names, pages in self._flying.pop(counter_index, ()) if landed else ():
            assert self._witness is not None
            self._witness.restored(names, pages)
        return landed


def _lost(_: Any) -> int:
    raise RuntimeError("the device is gone")
