"""The cost of encryption: an encrypted G3 store beside a plain one on the same disk, by turns.

The ratio is that of the same round; `cpu_s_per_gb` of the ratios is what encryption adds to the CPU time of a put (the
digest of the plain bytes included, as always) and of a get.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
from pathlib import Path
from typing import Any

from kvtier.bench.record import summary
from kvtier.bench.tiers.disk import DEADLINE_S, Bench, Pass
from kvtier.clock import SystemClock
from kvtier.keyring import DATA_KEY_BYTES, KEY_ID_BYTES, Key, Keyring
from kvtier.tiers.data_keys import StoredKeys
from kvtier.tiers.key_directory import KeyDirectory

TARGETS = {"put_over_plain": 0.8, "get_over_plain": 0.8, "put_cpu_s_per_gb": 0.45, "get_cpu_s_per_gb": 0.45}


def new_keys(folder: Path) -> StoredKeys:
    """Keys of a new keyring, in a directory below `folder`."""
    ring = Keyring([Key(secrets.token_bytes(KEY_ID_BYTES), secrets.token_bytes(DATA_KEY_BYTES))], bytes(32))
    return StoredKeys(KeyDirectory(folder / "data-keys"), ring, SystemClock())


def measure(folder: Path, block_bytes: int, total_bytes: int, rounds: int) -> dict[str, Any]:
    """Figures for one block size. Writes total_bytes × 2 × (rounds + 2) below `folder`, where twice total_bytes must be
    free. Blocks for minutes."""
    (folder / "plain").mkdir()
    (folder / "encrypted").mkdir()
    plain = Bench(folder / "plain", block_bytes, total_bytes)
    encrypted = Bench(folder / "encrypted", block_bytes, total_bytes, new_keys(folder))
    return asyncio.run(_rounds({"plain": plain, "encrypted": encrypted}, rounds))


async def _rounds(benches: dict[str, Bench], rounds: int) -> dict[str, Any]:
    passes: dict[str, list[Pass]] = {f"{verb}_{kind}": [] for verb in ("put", "get") for kind in benches}
    for bench in benches.values():
        await bench.tier.open()
    try:
        for bench in benches.values():
            for _ in range(2):  # the first fill allocates, the second one evicts
                await bench.put()
        for number in range(rounds):
            kinds = list(benches) if number % 2 else [*benches][::-1]
            for kind in kinds:
                passes[f"put_{kind}"].append(await benches[kind].put())
            for kind in kinds:
                passes[f"get_{kind}"].append(await benches[kind].get())
    finally:
        for bench in benches.values():
            await bench.tier.close(SystemClock().monotonic() + DEADLINE_S)
    figures: dict[str, Any] = {
        name: {
            "gb_per_s": summary([one.bytes_per_s / 1e9 for one in many]),
            "cpu_s_per_gb": summary([one.cpu_s_per_gb for one in many]),
        }
        for name, many in passes.items()
    }
    figures["ratios"] = {}
    for verb in ("put", "get"):
        pairs = list(zip(passes[f"{verb}_encrypted"], passes[f"{verb}_plain"], strict=True))
        figures["ratios"] |= {
            f"{verb}_over_plain": statistics.median(one.bytes_per_s / other.bytes_per_s for one, other in pairs),
            f"{verb}_cpu_s_per_gb": statistics.median(one.cpu_s_per_gb - other.cpu_s_per_gb for one, other in pairs),
        }
    return figures
