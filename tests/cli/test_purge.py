"""`kvtier purge` reaches what other processes stored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvtier
from kvtier.testing import payloads_of, sample_namespace

NS = sample_namespace(4096)


def test_purge_drops_one_tenant_from_disk_and_objects(run: Callable[..., Any], tmp_path: Path) -> None:
    file, fields = tmp_path / "kvtier.yaml", tmp_path / "namespace.json"
    file.write_text(
        f"tiers: {{g2: {{capacity: 4MiB}}, g3: {{path: {tmp_path}/g3, capacity: 64MiB}}, "
        f"g4: {{url: 'file://{tmp_path}/g4', stride: 2}}}}\n"
    )
    fields.write_text(json.dumps(NS.fields()))
    mine, other = (kvtier.chain_hashes(range(64), NS, salt=salt) for salt in ("a", "b"))
    with kvtier.open(kvtier.Config.load(file), NS) as cache:
        for keys in (mine, other):
            cache.put(keys, payloads_of(keys, 4096))
    done = run("purge", str(file), "--namespace", str(fields), "--salt", "a", "--json")
    assert done.status == 0
    assert json.loads(done.out)["purged_blocks"] == 8
    with kvtier.open(kvtier.Config.load(file), NS) as cache:
        assert (cache.match(mine), cache.match(other)) == (0, 4)
