"""vLLM's plug-in: names kvtier's connectors, and watches weights from their first loading on.

vLLM loads `register` in each of its processes through the entry-point group vllm.general_plugins, unless VLLM_PLUGINS
leaves it out. It imports next to nothing; the hooks are put in place where a worker is about to load weights, and only
for an engine whose connector is kvtier's. There a mistake in the configuration is found, too, before the weights are
loaded.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

CONNECTORS = {
    "KVTierConnector": "kvtier.connectors.vllm",
    "KVTierOffloadingConnector": "kvtier.connectors.vllm.offloading",
}
"""Names that vLLM knows through the plug-in, and their modules."""
TIER = "KVTierSecondaryTier"
"""The type of kvtier's tier below vLLM's own offloading."""
_MARK = "_kvtier_hook"


def register() -> None:
    """Called by vLLM, maybe several times in a process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name, module in CONNECTORS.items():
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, module, name)
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    original = WorkerWrapperBase.init_device
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def init_device(wrapper: Any, *arguments: Any, **named: Any) -> Any:
        prepare(getattr(wrapper, "vllm_config", None))
        return original(wrapper, *arguments, **named)

    setattr(init_device, _MARK, True)
    WorkerWrapperBase.init_device = init_device


def prepare(vllm_config: Any) -> None:
    """A worker is about to load weights. Raises ConfigError for a mistake in kvtier's configuration."""
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    given = _arguments(transfer)
    if not given:
        return
    from kvtier.connectors.settings import Settings
    from kvtier.connectors.vllm import capabilities, connector, weights
    from kvtier.tiers.disk.directory import check

    for name, arguments in given:
        if name == TIER:
            from kvtier.connectors.vllm.offloading import tier

            config = Settings.parse(arguments, tier.ARGUMENTS).config
        else:
            capabilities.check(connector.KVTierConnector)
            config = Settings.parse(arguments, connector.ARGUMENTS).config
        check(config.tiers.g3.path if config.tiers.g3 is not None else ())
        _warn_of_memory(config.tiers.g2.capacity)
        if config.weights == "full":
            weights.read_all_bytes()
    weights.install()


def _warn_of_memory(wanted: int) -> None:
    from kvtier.tiers.host.arena import available_bytes

    if wanted > (free := available_bytes()):
        log = logging.getLogger(__name__)
        log.warning(
            "tiers.g2.capacity: %d bytes asked for, memory has space for %d before weights are loaded", wanted, free
        )


def _arguments(transfer: Any) -> list[tuple[str, dict[str, Any]]]:
    """kvtier's connectors and tiers in an engine's configuration, with the arguments of each."""
    if transfer is None:
        return []
    extra = getattr(transfer, "kv_connector_extra_config", None) or {}
    connectors = [
        (transfer.kv_connector, extra),
        *((child.get("kv_connector"), child.get("kv_connector_extra_config") or {})
          for child in extra.get("connectors", ())),
    ]  # fmt: skip
    found = [(name, given) for name, given in connectors if name == "KVTierConnector"]
    below = [tier for _, given in connectors for tier in given.get("secondary_tiers", ()) if tier.get("type") == TIER]
    found += [(TIER, {key: tier[key] for key in tier if key not in ("type", "module_path")}) for tier in below]
    return found
