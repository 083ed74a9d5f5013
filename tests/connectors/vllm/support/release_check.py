"""What the connector's check at start says of the vLLM on this path. Run by `make vllm-releases`."""

from __future__ import annotations

from pathlib import Path

import vllm

from kvtier.connectors.vllm import capabilities, weights
from kvtier.connectors.vllm.connector import KVTierConnector

missing = capabilities.check(KVTierConnector)
print(capabilities.release(), "in", Path(vllm.__file__).parents[1].name)
print("  not called:", ", ".join(missing) or "nothing")
print("  not watched:", ", ".join(weights.install()) or "nothing")
raise SystemExit(capabilities.untested() or 0)
