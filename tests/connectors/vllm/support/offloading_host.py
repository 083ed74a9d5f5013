"""Like engine_host, with kvtier under vLLM's tiered offloading: {"tier": arguments of the tier, "host_bytes": …}."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import engine_host


class TierHost(engine_host.Host):
    def __init__(self, options: dict[str, Any]) -> None:
        tiers = []
        if options.get("tier") is not None:
            tier = {"type": "KVTierSecondaryTier", "module_path": "kvtier.connectors.vllm.offloading", "model": "tiny"}
            tiers.append({**tier, "lookup_deadline": "30s", **options["tier"]})
        transfer = {
            "kv_connector": options.get("connector", "KVTierOffloadingConnector"),
            "kv_connector_module_path": "kvtier.connectors.vllm.offloading",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "CpuTieringSpec",
                "spec_module_path": "kvtier.connectors.vllm.offloading.cpu_spec",
                "cpu_bytes_to_use": options.get("host_bytes", 16 << 20),
                "secondary_tiers": tiers,
                **options.get("extra", {}),
            },
        }
        options["engine"] = {"kv_transfer_config": transfer, **options.get("engine", {})}
        super().__init__(options)

    @property
    def manager(self) -> Any:
        return self.connector.connector_scheduler.manager

    @property
    def tier(self) -> Any:
        return self.manager.secondary_tiers[0]

    @property
    def cache(self) -> Any:
        return self.tier._cache

    def forget(self) -> bool:
        """vLLM's GPU blocks and its host cache are reused for something else."""
        self.settle()
        self.manager.primary_tier.reset_cache()
        return bool(self.reset())

    def flush(self) -> dict[str, Any]:
        self.settle()
        self.tier._jobs.wait()  # what is on its way to the cache, too
        return super().flush()

    def purge(self, salt: str) -> int:
        return int(self.cache.purge(salt=salt))

    def zero_host(self) -> None:
        import numpy as np

        self.settle()
        np.asarray(self.manager.primary_tier.get_kv_memoryview())[:] = 0

    def patience(self, lookup_deadline: float) -> None:
        self.tier._lookup_s = lookup_deadline
        self.tier._store_wait_s = lookup_deadline

    def idle(self) -> dict[str, int]:
        until = time.monotonic() + 10
        while True:
            self.cache.flush(10)
            self.cache.check()
            host = self.cache.stats()["g2"]
            found = {"requests": len(self.tier._requests), "pinned": host["pinned"], "quarantined": host["quarantined"]}
            if not any(found.values()) or time.monotonic() > until:
                return found


if __name__ == "__main__":
    engine_host.main(TierHost)
