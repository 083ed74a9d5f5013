"""`kvtier bench index`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.bench.tiers.index import BLOCK_TOKENS, TARGETS_US, measure
from kvtier.bench.tiers.observed import measure_observed
from kvtier.bench.tiers.scale import SIZES, measure_scale
from kvtier.cli.output import Json, console, deliver, write_table

Tokens = Annotated[int, typer.Option("--tokens", min=BLOCK_TOKENS, max=1 << 20, help="Tokens per prompt.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, max=1000, help="Interleaved rounds; the median counts.")]
Save = Annotated[Path | None, typer.Option("--save", help="Also write the JSON record into this folder.")]
Scale = Annotated[bool, typer.Option("--scale", help="Measure G2 with up to a million blocks instead.")]
Observed = Annotated[bool, typer.Option("--observed", help="Measure what spans, events and metrics cost instead.")]
Blocks = Annotated[int, typer.Option("--blocks", min=1000, help="With --scale: the largest number of blocks.")]


def index(
    tokens: Tokens = 8192,
    rounds: Rounds = 9,
    scale: Scale = False,
    observed: Observed = False,
    blocks: Blocks = SIZES[-1],
    folder: Save = None,
    json: Json = False,
) -> None:
    """Measure hashing, matching and the block pool, in CPU microseconds per block; with --scale every verb as G2
    grows; with --observed what spans, events and metrics cost."""
    if observed:
        deliver("observed", measure_observed(tokens, 30 * rounds), _show_observed, folder, as_json=json)
        return
    if scale:
        sizes = [size for size in SIZES if size < blocks] + [blocks]
        deliver("index_scale", {"sizes": measure_scale(sizes)}, _show_scale, folder, as_json=json)
        return
    results = {"unit": "microseconds of CPU time per block", "tokens": tokens, "targets": TARGETS_US}
    deliver("index", results | measure(tokens, rounds), _show, folder, as_json=json)


def _show_scale(results: dict[str, Any]) -> None:
    sizes = results["sizes"]
    head = [f"{entry['blocks']:,} blocks: µs per block, ms of lock, of loop" for entry in sizes]
    verbs = {verb: None for entry in sizes for verb in entry["verbs"]}
    cells = {
        verb: [", ".join(f"{figure:g}" for figure in entry["verbs"].get(verb, {}).values()) for entry in sizes]
        for verb in verbs
    }
    write_table(["thread CPU time", *head], [[verb, *row] for verb, row in cells.items()])
    filled = ", ".join(f"{one['bytes_per_block']} ({one['bytes_per_block_with_evicted']})" for one in sizes)
    console().print(f"bytes of bookkeeping per block (and with evicted ones that are remembered): {filled}")
    bare = ", ".join(f"{entry['bare_us_per_block']:g}" for entry in sizes)
    console().print(f"µs per block of a match in one bare dictionary of as many names: {bare}")
    collections = ", ".join(f"{entry['collection_ms']:g}" for entry in sizes)
    console().print(f"ms of the garbage collector's longest run, which these figures leave out: {collections}")
    same = ", ".join("{:g} to {:g}".format(*entry["same_work_ms"]) for entry in sizes)
    console().print(f"ms of one same piece of work, 3,000 times, the median and the longest: {same}")


def _show_observed(results: dict[str, Any]) -> None:
    rows = [[name, f["median"], f["min"], f["max"]] for name, f in results.items() if isinstance(f, dict)]
    write_table(["CPU µs per request", "median", "min", "max"], rows)
    console().print(
        f"spans, events and metrics cost {results['percent']:g} % (at most {results['target_percent']:g}); "
        f"a scrape takes {results['scrape_us']:g} µs"
    )


def _show(results: dict[str, Any]) -> None:
    rows = [
        [name, f["median"], f["min"], f["max"], TARGETS_US.get(name, "")]
        for name, f in results.items()
        if isinstance(f, dict) and "median" in f
    ]
    write_table(["CPU µs per block", "median", "min", "max", "at most"], rows)
    console().print(f"{results['tokens']} tokens, blocks of {BLOCK_TOKENS}; *_floor: the same work without kvtier")
