"""vLLM's policy for loads that fail."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)


def recomputes_failed_loads(engines: Any) -> bool:
    """Whether a request goes on without blocks that could not be copied in."""
    return bool(getattr(engines, "kv_load_failure_policy", "recompute") == "recompute")


def recompute_failed_loads(connector: str, own: Any, engines: Any) -> None:
    """A block that cannot be copied in costs time, and no request. vLLM reads its policy after its connector is made.
    `own` and `engines` are transfer configurations: the connector's, and the engine's, which may name others, too."""
    for config in (own, engines):
        if config.kv_connector == connector and hasattr(config, "kv_load_failure_policy"):
            config.kv_load_failure_policy = "recompute"
    if not recomputes_failed_loads(engines):
        log.warning(
            'kv_load_failure_policy is "fail": a block that cannot be copied in then fails its request; '
            'set "recompute", so that it costs time only'
        )
