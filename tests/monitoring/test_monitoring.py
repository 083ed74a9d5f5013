"""Dashboard and alerts name metrics, labels and sections that exist; a real Prometheus answers every query and fires
every alert, where Debian's package `prometheus` is installed."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvtier
from kvtier.metrics import BUILD, REQUESTS, TASKS, TIERS, Family, labels_of, serve
from kvtier.testing import chain_of, payloads_of, sample_namespace
from kvtier.testing.servers import free_ports

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "monitoring"
FAMILIES = {family.name: family for family in (BUILD, *REQUESTS.values(), *TASKS.values(), *TIERS.values())}
RULES: list[dict[str, Any]] = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
SELECTOR = re.compile(r"\b(kvtier_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*=~?\s*"([^"]*)"')
OF_PROMETHEUS = {"job", "instance"}


def panels() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = runpy.run_path(str(FOLDER / "dashboard.py"))["dashboard"]()["panels"]
    return [panel for panel in made if panel["type"] != "row"]


QUERIES = {rule["alert"]: rule["expr"] for rule in RULES} | {
    f"{panel['title']}: {target['legendFormat']}": target["expr"] for panel in panels() for target in panel["targets"]
}


def family_of(name: str) -> Family | None:
    for suffix in ("", "_total", "_bucket", "_sum", "_count"):
        if name.endswith(suffix) and (family := FAMILIES.get(name[: len(name) - len(suffix)])):
            return family
    return None


def faults(query: str) -> Iterator[str]:
    """Names in a query that kvtier does not show."""
    for name, selector in SELECTOR.findall(query):
        family = family_of(name)
        if family is None:
            yield f"{name} is no metric"
            continue
        counter = family.kind.__name__ == "Counter"
        if counter != name.endswith("_total"):
            yield f"{name}: a counter ends with _total, other metrics do not"
        for label, text in MATCHER.findall(selector):
            if label not in (*labels_of(family), *OF_PROMETHEUS, "le"):
                yield f"{name} has no label {label}"
            elif label == family.label and family.values:
                yield from (f"{name}: no {label} {one}" for one in text.split("|") if one not in family.values)


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_names_what_exists(name: str) -> None:
    assert SELECTOR.search(QUERIES[name]) and not list(faults(QUERIES[name]))


@pytest.mark.parametrize(
    "query",
    [
        "rate(kvtier_hits_total[5m])",
        "kvtier_hit_blocks",
        "kvtier_tier_blocks_total",
        'kvtier_tier_health{state="broken"}',
        'kvtier_miss_blocks_total{tier="g3"}',
    ],
)
def test_a_wrong_query_is_noticed(query: str) -> None:
    assert list(faults(query))


def test_the_dashboard_is_current() -> None:
    text = runpy.run_path(str(FOLDER / "dashboard.py"))["text"]()
    assert (FOLDER / "grafana.json").read_text() == text, "run `make reference`"


def test_each_alert_has_a_section_of_the_playbook_and_a_test() -> None:
    titles = re.findall(r"^## (.*)$", (ROOT / "docs" / "playbook.md").read_text(), re.M)
    anchors = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}
    tests = yaml.safe_load((FOLDER / "alerts_test.yaml").read_text())["tests"]
    *single, healthy = tests
    for rule in RULES:
        page, _, anchor = rule["annotations"]["playbook"].partition("#")
        assert (ROOT / page).is_file() and anchor in anchors, rule["alert"]
    names = {rule["alert"] for rule in RULES}
    assert {each["name"] for each in single} == names, "one that fires"
    assert {each["alertname"] for each in healthy["alert_rule_test"]} == names, "none on a healthy cache"
    assert all(each["alert_rule_test"][0]["exp_alerts"] for each in single)


def test_the_playbook_names_metrics_and_commands_that_exist() -> None:
    text = (ROOT / "docs" / "playbook.md").read_text()
    for name, selector in SELECTOR.findall(text):
        assert family_of(name), name
        assert not list(faults(f"{name}{{{selector}}}")), (name, selector)


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: apt-get install prometheus")
    return found


def promtool(*words: str) -> None:
    """Assert that Prometheus' own tool is content."""
    command = [program("promtool"), *words]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_at_its_fault_and_none_without() -> None:
    promtool("test", "rules", "alerts_test.yaml")


def test_the_example_is_a_configuration_of_prometheus() -> None:
    promtool("check", "config", "prometheus.yaml")


@pytest.mark.long
def test_a_real_prometheus_has_data_for_every_panel(tmp_path: Path) -> None:
    """Scraping a cache at work, for as long as rates need."""
    namespace, (port,) = sample_namespace(4096), free_ports(1)
    tiers = {
        "g2": {"capacity": "1MiB"},
        "g3": {"path": str(tmp_path / "g3"), "capacity": "2MiB", "write_budget": "100000DWPD"},
    }
    config = kvtier.Config.parse({"tiers": tiers})
    with kvtier.open(config, namespace) as cache, serve(cache.stats, 0) as endpoint:
        target = urllib.parse.urlsplit(endpoint.url).netloc
        scrape = {"job_name": "kvtier", "scrape_interval": "500ms", "static_configs": [{"targets": [target]}]}
        (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump({"scrape_configs": [scrape]}))
        command = [
            program("prometheus"), "--config.file", str(tmp_path / "prometheus.yaml"),
            "--storage.tsdb.path", str(tmp_path / "data"), "--web.listen-address", f"127.0.0.1:{port}",
        ]  # fmt: skip
        with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as prometheus:
            try:
                end = time.monotonic() + 60
                missing: set[str] = set(QUERIES)
                while missing and time.monotonic() < end:
                    work(cache, int(time.monotonic() * 2))
                    time.sleep(1)
                    missing = {f"{panel}" for panel in unanswered(f"http://127.0.0.1:{port}")}
                assert not missing
            finally:
                prometheus.terminate()
                prometheus.wait(20)


def work(cache: kvtier.Cache, seed: int) -> None:
    """Hits from RAM and disk, misses, evictions."""
    old = chain_of(cache.namespace, 64, seed=1)
    for keys in (old, chain_of(cache.namespace, 200, seed=seed)):
        cache.put(keys, payloads_of(keys, cache.namespace.block_bytes))
    cache.flush()
    cache.evict("g2")
    for keys in (old, chain_of(cache.namespace, 4, seed=10**6 + seed)):
        with cache.get(keys):
            pass


def unanswered(url: str) -> Iterator[str]:
    """Panels' queries without data. Those of trouble have none while there is none, but for what is 0."""
    for panel in panels():
        for at in panel["targets"]:
            query = at["expr"].replace('job=~"$job",instance=~"$instance"', 'job=~".+",instance=~".+"')
            query = query.replace("$__rate_interval", "10s")
            answer = f"{url}/api/v1/query?" + urllib.parse.urlencode({"query": query})
            try:
                with urllib.request.urlopen(answer, timeout=5) as page:
                    found = json.load(page)["data"]["result"]
            except OSError:  # it starts
                found = []
            if not [row for row in found if row["value"][1] not in ("NaN", "+Inf")]:
                yield f"{panel['title']}: {at['legendFormat']}"
