"""The examples of docs/deploy and the workflows name what exists, and fit kvtier's own files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier.config import Config

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "docs" / "deploy"
COMPOSE = DEPLOY / "compose"
CONNECTOR = ROOT / "connectors" / "vllm" / "connector.py"
KUBERNETES = DEPLOY / "kubernetes"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("folder", [COMPOSE, KUBERNETES], ids=lambda folder: folder.name)
def test_the_configurations_are_valid_and_their_disk_is_mounted(folder: Path) -> None:
    config = Config.load(folder / "kvtier.yaml", {})
    assert config.tiers.g3 is not None and all(path.is_relative_to("/nvme") for path in config.tiers.g3.path)
    assert "/nvme" in (folder / ("compose.yaml" if folder == COMPOSE else "deployment.yaml")).read_text()


def test_the_engine_is_given_the_connector_and_the_mounted_file() -> None:
    pod = read(KUBERNETES / "deployment.yaml")["spec"]["template"]["spec"]["containers"][0]
    for arguments in (read(COMPOSE / "compose.yaml")["services"]["vllm"]["command"], pod["args"]):
        (given,) = [json.loads(each.partition("=")[2]) for each in arguments if each.startswith("--kv-transfer-config")]
        assert f"class {given['kv_connector']}(" in CONNECTOR.read_text()
        assert given["kv_connector_extra_config"]["kvtier_config"] == "/etc/kvtier/kvtier.yaml"
        (seconds,) = [int(each.partition("=")[2]) for each in arguments if each.startswith("--shutdown-timeout")]
        assert seconds < 60, "the time that both leave for stopping"


def test_what_compose_mounts_is_there() -> None:
    for service in read(COMPOSE / "compose.yaml")["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (COMPOSE / source).exists(), source
    assert (COMPOSE / read(COMPOSE / "compose.yaml")["services"]["vllm"]["build"]["context"]).resolve() == ROOT
    variables = set(re.findall(r"\$\{(\w+)", (COMPOSE / "compose.yaml").read_text()))
    given = {line.partition("=")[0] for line in (COMPOSE / "example.env").read_text().split()}
    assert variables == given


def test_the_compose_file_is_one_by_its_specification() -> None:
    """Keys, values and references between its parts, with the variables filled in as `docker compose` does."""
    import compose_spec as specification

    text = (COMPOSE / "compose.yaml").read_text()
    given = dict(line.split("=", 1) for line in (COMPOSE / "example.env").read_text().split())

    def parsed(text: str) -> Any:
        return specification.PyCompose.from_yaml(re.sub(r"\$\{(\w+)[^}]*\}", lambda each: given[each[1]] or "x", text))

    found = parsed(text)
    found.validate()
    assert set(found.service_names()) == {"vllm", "prometheus", "grafana"}
    for wrong in (text.replace("stop_grace_period: 60s", "stop_grace_period: soon"), text.replace("ipc:", "ipcs:")):
        with pytest.raises(ValueError, match="services"):
            parsed(wrong)


def test_the_router_hears_the_engine_where_it_publishes() -> None:
    """The overlay is one by its specification, changes the engine's command by its events alone, and says of the
    engine what that command says."""
    import compose_spec as specification

    text = (COMPOSE / "router.yaml").read_text()
    given = dict(line.split("=", 1) for line in (COMPOSE / "example.env").read_text().split())
    filled = re.sub(r"\$\{(\w+)[^}]*\}", lambda each: given[each[1]] or "x", text)
    specification.PyCompose.from_yaml(filled).validate()
    services = read(COMPOSE / "router.yaml")["services"]
    plain = read(COMPOSE / "compose.yaml")["services"]["vllm"]["command"]
    command = services["vllm"]["command"]
    assert command[: len(plain)] == plain
    more = dict(one.removeprefix("--").split("=", 1) for one in command[len(plain) :])
    events = json.loads(more["kv-events-config"])
    (data,) = [one.removeprefix("--data=") for one in services["register"]["command"] if one.startswith("--data=")]
    engine = json.loads(data)
    assert engine["block_size"] == int(more["block-size"]) and events["enable_kv_cache_events"] is True
    ports = [events[name].rpartition(":")[2] for name in ("endpoint", "replay_endpoint")]
    assert [engine["kv_events_endpoints"]["0"], engine["replay_endpoint"]] == [f"tcp://vllm:{port}" for port in ports]
    assert services["register"]["command"][-1] == "http://selector:8092/workers"
    assert set(services) - {"vllm"} == {"selector", "register"} and "--port 8092" in services["selector"]["command"][2]


def test_prometheus_renames_the_engines_metrics_as_in_docs_monitoring() -> None:
    own, theirs = (
        [job["metric_relabel_configs"] for job in read(path)["scrape_configs"] if job["job_name"] == "engines"]
        for path in (COMPOSE / "prometheus.yaml", ROOT / "docs" / "monitoring" / "prometheus.yaml")
    )
    assert own == theirs


def test_the_base_for_kubernetes_fits_together() -> None:
    base = read(KUBERNETES / "kustomization.yaml")
    deployment, service = (read(KUBERNETES / name) for name in base["resources"])
    (made,) = base["configMapGenerator"]
    pod = deployment["spec"]["template"]
    assert all((KUBERNETES / name).is_file() for name in made["files"])
    assert made["name"] in {volume.get("configMap", {}).get("name") for volume in pod["spec"]["volumes"]}
    labels = pod["metadata"]["labels"].items()
    assert service["spec"]["selector"].items() <= labels
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels
    (engine,) = pod["spec"]["containers"]
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= {port["name"] for port in engine["ports"]}
    assert engine["image"] in {image["name"] for image in base["images"]}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_takes_the_base() -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(KUBERNETES)], capture_output=True, text=True, check=True, timeout=60
    )
    kinds = {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}
    assert set(kinds) == {"ConfigMap", "Deployment", "Service"}
    labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert kinds["Service"]["spec"]["selector"].items() <= labels.items()


def test_workflows_call_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))
    called = set[str]()
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        for command in re.findall(r"run: .*?\bmake ([^&|;\n]*)", workflow.read_text()):
            called |= {word for word in command.split() if "=" not in word}
    assert {"setup", "check", "test", "docs", "dist"} <= called <= targets


def test_the_site_has_every_page() -> None:
    nav = yaml.safe_load((ROOT / "docs" / "mkdocs.yml").read_text())["nav"]
    listed = set(re.findall(r"'([\w-]+\.md)'", repr(nav)))
    own = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert listed == own | {"index.md", "changelog.md", "contributing.md", "security.md"}
