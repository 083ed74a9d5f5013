"""A KVTierLinker for tests: with faults in its lower tiers or in what it loads, and a port that takes orders."""

from __future__ import annotations

import json
import socketserver
import threading
from typing import Any

import kvtier
from kvtier.clock import SystemClock
from kvtier.connectors.sglang import KVTierLinker
from kvtier.namespace import Namespace
from kvtier.stack import lower_tiers
from kvtier.testing import Fault, FaultyTier


class TrialLinker(KVTierLinker):
    """`linker_extra_config` has one more key, `control`: a TCP port of rank 0 (rank r has the port r above it), where
    a line {"do": verb, …} is answered by a line of JSON. Verbs are the methods `do_…`."""

    def __init__(self, *arguments: Any, extra_config: dict[str, Any], **named: Any) -> None:
        port = int(extra_config.pop("control"))
        self._faulty: dict[str, FaultyTier] = {}
        self._scramble = self._refuse = self._lose = False
        super().__init__(*arguments, extra_config=extra_config, **named)
        self._listen(port + self._rotation.namespace.rank)

    def open_cache(self, namespace: Namespace) -> kvtier.Cache:
        config, clock = self._settings.config, SystemClock()
        tiers = [FaultyTier(tier, seed=7) for tier in lower_tiers(config, namespace, clock)]
        self._faulty = {tier.name: tier for tier in tiers}
        return kvtier.open(config, namespace, tiers=tiers)

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
        self, faults: dict[str, list[list[Any]]] | None = None, scramble: bool = False, refuse: bool = False,
        lose: bool = False,
    ) -> None:  # fmt: skip
        """From now on: `faults[tier]` are [verb, kind, rate, times, seconds]; `scramble` damages bytes between their
        check and the device, `refuse` refuses loads, `lose` lets loads fail after their start."""
        for name, tier in self._faulty.items():
            tier.faults = [Fault(*fault) for fault in (faults or {}).get(name, [])]
        self._scramble, self._refuse, self._lose = scramble, refuse, lose

    def do_evict(self, tier: str) -> int:
        return self._cache.evict(tier)

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
        held = {"visits": len(self._visits), "queued": len(self._queue), "loads": len(self._loads)}
        return {**held, "offloads": self._pages.outstanding(), "pinned": g2["pinned"], "quarantined": g2["quarantined"]}

    def do_namespace(self) -> dict[str, Any]:
        return dict(self._rotation.namespace.fields())

    # ── what orders change ──────────────────────────────────────────────────────────────────────────────────

    def load(self, rid: str, transfers: Any) -> bool:
        if self._refuse:
            return False
        queued = super().load(rid, transfers)
        if queued and self._scramble:
            for slot in self._queue[-1][1].slots:
                half = len(slot.pieces[0]) // 2
                slot.pieces[0][:half] = bytes(slot.pieces[0][half:])
        return queued

    def start_layer_wise_loading(self) -> int:
        if self._lose and self._queue:
            assert self._pages is not None
            self._pages._engine.load = _lost
            try:
                return super().start_layer_wise_loading()
            finally:
                del self._pages._engine.load
        return super().start_layer_wise_loading()


def _lost(_: Any) -> int:
    raise RuntimeError("the device is gone")
