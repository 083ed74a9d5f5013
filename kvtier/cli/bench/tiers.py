"""`kvtier bench tiers`."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import uuid4

import typer

from kvtier.bench.record import record, save
from kvtier.cli.output import Json, console, write_json, write_table
from kvtier.config import G4, Config
from kvtier.errors import ConfigError
from kvtier.units import parse_size

if TYPE_CHECKING:
    from kvtier.bench.tiers.objects import Place

Tier = Annotated[str, typer.Option("--tier", help="g2: host RAM; g3: local disk; g4: object storage.")]
File = Annotated[
    Path | None, typer.Option("--config", help="Measure on its tiers; default: a server started on loopback.")
]
Rounds = Annotated[int, typer.Option("--rounds", min=1, max=100, help="Interleaved rounds; the median counts.")]
Part = Annotated[
    str, typer.Option("--part", help="g4: reads (throughput, CPU) or bucket (look-ups, requests, prices).")
]
Strides = Annotated[
    int, typer.Option("--strides", min=32, help="g4: objects that the bucket is filled with for look-ups.")
]
Folder = Annotated[Path, typer.Option("--path", help="g3: a directory on the disk to measure.")]
Size = Annotated[str, typer.Option("--size", help="g3: bytes per pass; twice that must be free.")]
Blocks = Annotated[list[str], typer.Option("--block", help="g2, g3: block size; may be given several times.")]
Restart = Annotated[bool, typer.Option("--restart", help="g3: also open a store of a million blocks.")]
Save = Annotated[Path | None, typer.Option("--save", help="Also write the JSON record into this folder.")]


def tiers(
    tier: Tier = "g4", config: File = None, rounds: Rounds = 3, part: Part = "reads", strides: Strides = 10_000,
    path: Folder = Path(), size: Size = "4GiB",
    block: Blocks = ["2MiB"], restart: Restart = False,  # noqa: B006 (typer's way to have a default)
    folder: Save = None, json: Json = False,
) -> None:  # fmt: skip
    """Measure a tier beside the library it stands on and beside no library at all, in the same run."""
    if tier == "g3":
        from kvtier.cli.bench.disk import disk_results, show_disk

        _deliver("tiers_g3", disk_results(path, size, block, rounds, restart), show_disk, folder, as_json=json)
        return
    if tier == "g2":
        _deliver("tiers_g2", _host(block, rounds), _show_host, folder, as_json=json)
        return
    if tier != "g4":
        raise ConfigError(f"--tier is {tier!r}: this command measures g2, g3 and g4")
    if part not in ("reads", "bucket"):
        raise ConfigError(f"--part is {part!r}: write reads or bucket")
    g4 = Config.load(config).tiers.g4 if config is not None else None
    with _place(g4) as place:
        server = "SeaweedFS on loopback, same machine" if g4 is None else "as configured"
        found: dict[str, Any] = {"load_average_before": os.getloadavg(), "server": server}
        if part == "reads":
            _deliver("tiers_g4", found | _reads(place, rounds), _show_reads, folder, as_json=json)
        else:
            found |= _bucket(place, strides, g4 or G4(url=place.url))
            _deliver("tiers_g4_bucket", found, _show_bucket, folder, as_json=json)


def _reads(place: Place, rounds: int) -> dict[str, Any]:
    from kvtier.bench.tiers import objects

    clients: tuple[Literal["s3fs", "obstore"], ...] = ("s3fs", "obstore")
    return {"clients": {client: objects.measure(place, client, rounds) for client in clients}}


def _show_reads(found: dict[str, Any]) -> None:
    for client, results in found["clients"].items():
        rows = [
            [label, *(_two(f[name]["gb_per_s"]["median"]) for name in ("kvtier", "client", "http")),
             *(_two(ratio["median"]) for ratio in f["ratios"].values()),
             *(_two(f[name]["cpu_s_per_gb"]["median"]) for name in ("kvtier", "client", "http"))]
            for label, f in results["reads"].items()
        ]  # fmt: skip
        columns = ["read", "kvtier GB/s", client, "http", f"/{client}", "/http", "CPU s/GB kvtier", client, "http"]
        write_table(columns, rows, title=f"G4 over {client}")


def _bucket(place: Place, strides: int, g4: G4) -> dict[str, Any]:
    from kvtier.bench.tiers import bucket

    return {"lookup": bucket.lookups(place, strides), "requests": bucket.per_100k_tokens(g4)}


def _show_bucket(found: dict[str, Any]) -> None:
    looked, cost = found["lookup"], found["requests"]
    cold = looked["cold"]
    console().print(
        f"lookup of 512 blocks in a bucket of {looked['strides']:,} strides: {looked['warm_ms']['median']:.2f} ms by "
        f"the index, {cold['ms']['median']:.1f} ms cold, by {cold['requests']['median']:.0f} requests in "
        f"{cold['round_trips']} round trips\n"
        f"{cost['tokens']:,} tokens, {cost['bytes_each_way'] / 1e9:.1f} GB: stored by {cost['store']['requests']} for "
        f"${cost['store']['dollars']}, loaded by {cost['load']['requests']} for ${cost['load']['dollars']}, kept for "
        f"${cost['dollars_per_day_kept']} a day"
    )


def _deliver(
    name: str, results: dict[str, Any], show: Callable[[dict[str, Any]], None], folder: Path | None, *, as_json: bool
) -> None:
    entry = record(name, ["kvtier", *sys.argv[1:]], results)
    if folder is not None:
        save(entry, folder)
    if as_json:
        write_json(entry)
    else:
        show(results)


def _host(blocks: list[str], rounds: int) -> dict[str, Any]:
    from kvtier.bench.tiers import host

    return {
        "load_average_before": os.getloadavg(),
        "target_ratio": host.TARGET_RATIO,
        "blocks": {text: host.measure(parse_size(text), rounds=rounds) for text in blocks},
    }


def _show_host(results: dict[str, Any]) -> None:
    rows = [
        [text, verb, _two(f[verb]["median"] / 1e9), _two(f[f"copy_{verb}"]["median"] / 1e9), _two(f[ratio]["median"])]
        for text, f in results["blocks"].items()
        for verb, ratio in (("put", "put_ratio"), ("get", "get_ratio"))
    ]
    write_table(["block", "", "GB/s", "plain copy", f"ratio (≥ {results['target_ratio']})"], rows, title="G2")


def _two(figure: float) -> float:
    return round(figure, 2)


@contextmanager
def _place(g4: G4 | None) -> Iterator[Place]:
    """A folder of its own in the configured bucket, emptied afterwards; or a bucket of a server on loopback."""
    from kvtier.bench.tiers.objects import Place, emptied

    if g4 is not None:
        if not g4.url.startswith("s3://"):
            raise ConfigError(f"tiers.g4.url is {g4.url}: this measures an s3:// URL")
        with emptied(Place(f"{g4.url.rstrip('/')}/kvtier-bench-{uuid4().hex[:12]}", g4.options)) as place:
            yield place
        return
    from kvtier.testing.servers import SeaweedFS

    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder:
        server = SeaweedFS(Path(folder))
        server.start()
        try:
            yield Place(f"{server.new_bucket()}/bench", server.options)
        finally:
            server.stop()
