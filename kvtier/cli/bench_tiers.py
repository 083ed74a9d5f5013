"""`kvtier bench tiers`."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvtier.bench.record import record, save
from kvtier.cli.output import Json, console, write_json, write_table
from kvtier.config import Config
from kvtier.errors import ConfigError
from kvtier.units import parse_size

Tier = Annotated[str, typer.Option("--tier", help="g2: host RAM; g3: local disk; g4: object storage.")]
File = Annotated[
    Path | None, typer.Option("--config", help="Measure on its tiers; default: a server started on loopback.")
]
Rounds = Annotated[int, typer.Option("--rounds", min=1, max=100, help="Interleaved rounds; the median counts.")]
Units = Annotated[int, typer.Option("--units", min=0, help="Strides in the index for the warm lookup.")]
PutPrice = Annotated[float, typer.Option("--put-price", help="Dollars per 1,000 PUT, COPY and LIST requests.")]
GetPrice = Annotated[float, typer.Option("--get-price", help="Dollars per 1,000 GET requests.")]
Folder = Annotated[Path, typer.Option("--path", help="g3: a directory on the disk to measure.")]
Size = Annotated[str, typer.Option("--size", help="g3: bytes per pass; twice that must be free.")]
Blocks = Annotated[list[str], typer.Option("--block", help="g2, g3: block size; may be given several times.")]
Restart = Annotated[bool, typer.Option("--restart", help="g3: also open a store of a million blocks.")]
Save = Annotated[Path | None, typer.Option("--save", help="Also write the JSON record into this folder.")]


def tiers(
    tier: Tier = "g4", config: File = None, rounds: Rounds = 3, units: Units = 100_000,
    put_price: PutPrice = 0.005, get_price: GetPrice = 0.0004, path: Folder = Path(), size: Size = "4GiB",
    block: Blocks = ["2MiB"], restart: Restart = False,  # noqa: B006 (typer's way to have a default)
    folder: Save = None, json: Json = False,
) -> None:  # fmt: skip
    """Measure a tier beside the library it stands on and beside no library at all, in the same run."""
    if tier == "g3":
        from kvtier.cli.bench_disk import disk_results, show_disk

        _deliver("tiers_g3", disk_results(path, size, block, rounds, restart), show_disk, folder, as_json=json)
        return
    if tier == "g2":
        _deliver("tiers_g2", _host(block, rounds), _show_host, folder, as_json=json)
        return
    if tier != "g4":
        raise ConfigError(f"--tier is {tier!r}: this command measures g2, g3 and g4")
    entry = record("tiers_g4", ["kvtier", *sys.argv[1:]], _objects(config, rounds, units, put_price, get_price))
    if folder is not None:
        save(entry, folder)
    if json:
        write_json(entry)
        return
    for client, results in entry["results"]["clients"].items():
        rows = [
            [label, *(_two(f[name]["gb_per_s"]["median"]) for name in ("kvtier", "client", "http")),
             *(_two(ratio) for ratio in f["ratios"].values()),
             *(_two(f[name]["cpu_s_per_gb"]["median"]) for name in ("kvtier", "client", "http"))]
            for label, f in results["reads"].items()
        ]  # fmt: skip
        columns = ["read", "kvtier GB/s", client, "http", f"/{client}", "/http", "CPU s/GB kvtier", client, "http"]
        write_table(columns, rows, title=f"G4 over {client}")
    looked = entry["results"]["lookup"]
    console().print(
        f"lookup of 512 blocks: {looked['warm_ms']['median']:.2f} ms with {units:,} strides in the index, "
        f"{looked['cold_ms']['median']:.1f} ms cold with {looked['cold_probes']['median']:.0f} probes"
    )
    cost = entry["results"]["requests"]
    console().print(
        f"{cost['tokens']:,} tokens: stored with {cost['store']['requests']} for ${cost['store']['dollars']}, "
        f"loaded with {cost['load']['requests']} for ${cost['load']['dollars']}"
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
    from kvtier.bench import host

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


def _objects(file: Path | None, rounds: int, units: int, put_price: float, get_price: float) -> dict[str, Any]:
    from kvtier.bench import objects

    clients: tuple[Literal["s3fs", "obstore"], ...] = ("s3fs", "obstore")
    with _place(file) as place:
        return {
            "load_average_before": os.getloadavg(),
            "server": "SeaweedFS on loopback, same machine" if file is None else "as configured",
            "clients": {client: objects.measure(place, client, rounds) for client in clients},
            "lookup": objects.lookups(place, units, rounds),
            "requests": objects.requests_per_100k_tokens(put_price, get_price),
        }


@contextmanager
def _place(file: Path | None) -> Iterator[Any]:
    from kvtier.bench.objects import Place

    if file is not None:
        g4 = Config.load(file).tiers.g4
        if g4 is None or not g4.url.startswith("s3://"):
            raise ConfigError(f"{file} names no s3:// URL at tiers.g4.url")
        yield Place(f"{g4.url.rstrip('/')}/kvtier-bench", g4.options)
        return
    from kvtier.testing.servers import SeaweedFS

    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder:
        server = SeaweedFS(Path(folder))
        server.start()
        try:
            yield Place(f"{server.new_bucket()}/bench", server.options)
        finally:
            server.stop()
