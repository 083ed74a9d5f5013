"""Linkers for tests: KVTierLinker with faults in its lower tiers or in what it loads, steered by a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kvtier
from kvtier.cache import lower_tiers
from kvtier.clock import SystemClock
from kvtier.connectors.sglang import KVTierLinker
from kvtier.namespace import Namespace
from kvtier.testing import Fault, FaultyTier


class TrialLinker(KVTierLinker):
    """`linker_extra_config` has one more key, `trial`: the path of a JSON file, read before each look-up.

    {"faults": {"g3": [["read", "error", 0.5], …]}}   a tier's faults: verb, kind, rate
    {"scramble": true}                           bytes are damaged between their check and the device
    {"refuse": true}                             loads are refused
    """

    def __init__(self, *arguments: Any, extra_config: dict[str, Any], **named: Any) -> None:
        self._trial = Path(extra_config.pop("trial"))
        self._faulty: dict[str, FaultyTier] = {}
        super().__init__(*arguments, extra_config=extra_config, **named)

    def open_cache(self, namespace: Namespace) -> kvtier.Cache:
        config, clock = self._settings.config, SystemClock()
        tiers = [FaultyTier(tier) for tier in lower_tiers(config, namespace, clock)]
        self._faulty = {tier.name: tier for tier in tiers}
        return kvtier.open(config, namespace, tiers=tiers)

    def _wanted(self) -> dict[str, Any]:
        try:
            wanted: dict[str, Any] = json.loads(self._trial.read_text())
        except FileNotFoundError:
            wanted = {}
        for name, tier in self._faulty.items():
            tier.faults = [Fault(*fault) for fault in wanted.get("faults", {}).get(name, [])]
        return wanted

    def lookup(self, rid: str, transfers: Any) -> list[int]:
        self._wanted()
        return super().lookup(rid, transfers)

    def load(self, rid: str, transfers: Any) -> bool:
        wanted = self._wanted()
        if wanted.get("refuse"):
            return False
        queued = super().load(rid, transfers)
        if queued and wanted.get("scramble"):
            for slot in self._queue[-1][1].slots:
                half = len(slot.pieces[0]) // 2
                slot.pieces[0][:half] = bytes(slot.pieces[0][half:])
        return queued
