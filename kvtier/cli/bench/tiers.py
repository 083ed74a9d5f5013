"""`kvtier bench tiers`: a tier beside the library it uses and the bare device, in one run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import uuid4

import typer

from kvtier.cli.output import Json, console, deliver, write_table
from kvtier.config import G4, Config
from kvtier.errors import ConfigError
from kvtier.units import parse_size

if TYPE_CHECKING:
    from kvtier.bench.tiers.objects import ServerPlace

RESTART_BLOCKS = 1_000_000

Tier = Annotated[str, typer.Option("--tier", help="g2: host RAM; g3: local disk; g4: object storage.")]
File = Annotated[
    Path | None, typer.Option("--config", help="g4: use the bucket in this file; none: a server on loopback.")
]
Rounds = Annotated[int, typer.Option("--rounds", min=1, max=100, help="Interleaved rounds; the median counts.")]
Part = Annotated[
    str, typer.Option("--part", help="g4: reads (throughput, CPU) or bucket (look-ups, requests, prices).")
]
Strides = Annotated[int, typer.Option("--strides", min=32, help="g4: objects in the bucket during look-ups.")]
Folder = Annotated[Path, typer.Option("--path", help="g3: a directory on the disk to measure.")]
Size = Annotated[str, typer.Option("--size", help="g3: bytes per pass; twice that must be free.")]
Blocks = Annotated[list[str], typer.Option("--block", help="g2, g3: block size; may be given several times.")]
Restart = Annotated[bool, typer.Option("--restart", help="g3: also a store of a million blocks: open, puts, verify.")]
Encrypted = Annotated[bool, typer.Option("--encrypted", help="g3, g4: encrypted beside plain instead.")]
Save = Annotated[Path | None, typer.Option("--save", help="Also write the JSON record into this folder.")]


def tiers(
    tier: Tier = "g4", config: File = None, rounds: Rounds = 3, part: Part = "reads", strides: Strides = 10_000,
    path: Folder = Path(), size: Size = "4GiB",
    block: Blocks = ["2MiB"], restart: Restart = False, encrypted: Encrypted = False,  # noqa: B006 (typer's way to have a default)
    folder: Save = None, json: Json = False,
) -> None:  # fmt: skip
    """Benchmark a tier against the library it uses and against no library at all, in the same run."""
    if tier not in ("g2", "g3", "g4"):
        raise ConfigError(f"--tier is {tier!r}: this command measures g2, g3 and g4")
    if tier == "g4" and part not in ("reads", "bucket"):
        raise ConfigError(f"--part is {part!r}: write reads or bucket")
    found: dict[str, Any] = {"load_average_before": os.getloadavg()}
    if tier == "g2":
        deliver("tiers_g2", found | _host(block, rounds), _show_host, folder, as_json=json)
    elif tier == "g3" and encrypted:
        deliver(
            "tiers_encryption", found | _encryption(path, size, block, rounds), _show_encryption, folder, as_json=json
        )
    elif tier == "g3":
        deliver("tiers_g3", found | _disk(path, size, block, rounds, restart), _show_disk, folder, as_json=json)
    elif encrypted:
        found |= _encrypted_bucket(rounds)
        deliver("tiers_encryption_g4", found, _show_encryption, folder, as_json=json)
    else:
        g4 = Config.load(config).tiers.g4 if config is not None else None
        found["server"] = "SeaweedFS on loopback, same machine" if g4 is None else "as configured"
        with _place(g4) as place:
            if part == "reads":
                deliver("tiers_g4", found | _reads(place, rounds), _show_reads, folder, as_json=json)
            else:
                found |= _bucket(place, strides, g4 or G4(url=place.url))
                deliver("tiers_g4_bucket", found, _show_bucket, folder, as_json=json)


def _host(blocks: list[str], rounds: int) -> dict[str, Any]:
    from kvtier.bench.tiers import host

    return {
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


def _disk(path: Path, size: str, blocks: Sequence[str], rounds: int, restart: bool) -> dict[str, Any]:
    """Figures for each block size, and for a store of many blocks. Writes many times `size` below `path`, and
    deletes it."""
    from kvtier.bench.tiers import disk, large_store

    total = parse_size(size)
    results: dict[str, Any] = {"total_bytes": total, "targets": disk.TARGETS, "blocks": {}}
    for text in blocks:
        with _folder(path) as folder:
            results["blocks"][text] = disk.measure(folder, parse_size(text), total, rounds)
    if restart:
        with _folder(path) as folder:
            results["restart"] = large_store.measure(folder, RESTART_BLOCKS)
    return results


def _encryption(path: Path, size: str, blocks: Sequence[str], rounds: int) -> dict[str, Any]:
    """An encrypted store beside a plain one, for each block size. Writes below `path`, and deletes it."""
    from kvtier.bench.tiers import encryption

    results: dict[str, Any] = {"total_bytes": parse_size(size), "targets": encryption.TARGETS, "blocks": {}}
    for text in blocks:
        with _folder(path) as folder:
            results["blocks"][text] = encryption.measure(folder, parse_size(text), parse_size(size), rounds)
    return results


def _encrypted_bucket(rounds: int) -> dict[str, Any]:
    from kvtier.bench.tiers import encryption

    with _place(None) as place, tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder:
        figures = encryption.measure_bucket(place, Path(folder), rounds)
    server = "SeaweedFS on loopback, same machine"
    return {"server": server, "targets": encryption.BUCKET_TARGETS, "blocks": {"16 × 2MiB": figures}}


def _show_encryption(results: dict[str, Any]) -> None:
    rows = [
        [label, name, _two(one["gb_per_s"]["median"]), round(one["cpu_s_per_gb"]["median"], 3)]
        for label, figures in results["blocks"].items()
        for name, one in figures.items()
        if name != "ratios"
    ]
    write_table(["block", "", "GB/s", "CPU s/GB"], rows, title="encrypted beside plain")
    rows = [
        [label, name, round(value, 3), results["targets"][name]]
        for label, figures in results["blocks"].items()
        for name, value in figures["ratios"].items()
    ]
    write_table(["block", "", "measured", "target"], rows)


@contextmanager
def _folder(path: Path) -> Iterator[Path]:
    try:
        folder = tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=path, ignore_cleanup_errors=True)
    except OSError as error:
        raise ConfigError(f"--path {path}: {error.strerror}; give a directory on the disk to measure") from None
    with folder as name:
        yield Path(name)


def _show_disk(results: dict[str, Any]) -> None:
    rows = []
    for label, figures in results["blocks"].items():
        for name in ("raw_write", "digested_write", "synced_write", "put", "raw_read", "get"):
            speed, cpu = figures[name]["gb_per_s"], figures[name]["cpu_s_per_gb"]
            rows.append([label, name, *(_two(speed[of]) for of in ("median", "min", "max")), round(cpu["median"], 3)])
    write_table(["block", "", "GB/s", "min", "max", "CPU s/GB"], rows, title="G3 beside the raw disk")
    rows = [
        [label, name, round(value, 3), results["targets"].get(name, "")]
        for label, figures in results["blocks"].items()
        for name, value in figures["ratios"].items()
    ]
    write_table(["block", "", "measured", "target"], rows)
    for label, figures in results["blocks"].items():
        beside = figures["written_beside_gets_gb_per_s"]["median"]
        console().print(f"{label}: {beside:.2f} GB/s were written beside the gets")
    if "restart" in results:
        restart = results["restart"]
        console().print(
            f"restart with {restart['blocks']:,} blocks: open in {restart['open_s']:.3f} s, "
            f"first block {1000 * restart['first_hit_after_open_s']:.1f} ms later; "
            f"{restart['puts_per_s']['alone']:.0f} puts per second of 4 KiB, "
            f"{restart['beside_verify_over_alone']:.2f} of that beside verify; an index of "
            f"{restart['index_bytes_per_block']:.0f} bytes per block, to which a lone put writes "
            f"{restart['index_bytes_written_per_lone_put'] / 1000:.1f} KB and each of 32 at once "
            f"{restart['index_bytes_written_per_put_of_32'] / 1000:.1f}"
        )
        turnover, shrink = restart["turnover"], restart["shrink"]
        console().print(
            f"{turnover['blocks']:,} blocks replaced at {turnover['puts_per_s']:.0f} per second: "
            f"{_transactions(turnover['transaction_cpu_ms'])}, "
            f"{turnover['index_bytes_written_per_put'] / 1000:.1f} KB written to the index per put, which has "
            f"{turnover['index_bytes_per_block']:.0f} bytes per block then"
        )
        console().print(
            f"with half the capacity: {shrink['blocks']:,} blocks after {shrink['seconds']:.1f} s, with "
            f"{shrink['puts_per_s']:.0f} puts per second meanwhile ({shrink['puts_per_s_afterwards']:.0f} afterwards); "
            f"{_transactions(shrink['transaction_cpu_ms'])}"
        )


def _transactions(cpu_ms: dict[str, float]) -> str:
    return f"transactions of {cpu_ms['p50']:.1f} ms of CPU time (p99 {cpu_ms['p99']:.1f}, longest {cpu_ms['max']:.1f})"


def _reads(place: ServerPlace, rounds: int) -> dict[str, Any]:
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


def _bucket(place: ServerPlace, strides: int, g4: G4) -> dict[str, Any]:
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


@contextmanager
def _place(g4: G4 | None) -> Iterator[ServerPlace]:
    """A new prefix in the configured bucket, emptied afterwards; or a bucket of a server on loopback."""
    from kvtier.bench.tiers.objects import ServerPlace, emptied, on_loopback

    if g4 is None:
        with on_loopback() as place:
            yield ServerPlace(f"{place.url}/bench", place.options)
        return
    if not g4.url.startswith("s3://"):
        raise ConfigError(f"tiers.g4.url is {g4.url}: this measures an s3:// URL")
    with emptied(ServerPlace(f"{g4.url.rstrip('/')}/kvtier-bench-{uuid4().hex[:12]}", g4.options)) as place:
        yield place


def _two(figure: float) -> float:
    return round(figure, 2)
