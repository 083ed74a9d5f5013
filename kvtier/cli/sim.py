"""`kvtier sim`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvtier.cli.output import Json, console, counting, write_json, write_table
from kvtier.errors import InvalidRequest
from kvtier.sim import History, Played, make_history, play, shrink
from kvtier.sim.history import HOSTS_MAX, STEPS

Seeds = Annotated[str, typer.Option("--seeds", help="One seed, or the first and the last: 0-1999.")]
Mode = Annotated[
    Literal["safety", "liveness", "engines"], typer.Option("--mode", help="The promises to check, as said above.")
]
Hosts = Annotated[int, typer.Option("--hosts", min=0, max=HOSTS_MAX, help="Machines; 0: one to three, by the seed.")]
Steps = Annotated[int, typer.Option("--steps", min=1, max=10_000, help="Steps of a history.")]
Disk = Annotated[
    Literal["model", "real"], typer.Option("--disk", help="G3: a model, or the real one on virtual disks.")
]
Shrink = Annotated[bool, typer.Option("--shrink/--no-shrink", help="Leave steps out of a failing history.")]
Folder = Annotated[Path, typer.Option("--folder", help="Where failing histories are kept.")]
Replay = Annotated[Path | None, typer.Option("--replay", help="Play a kept history instead, and print it.")]

FAILURES_MAX = 10
"""After so many a run ends."""


def sim(
    seeds: Seeds = "0-199",
    mode: Mode = "safety",
    hosts: Hosts = 0,
    steps: Steps = STEPS,
    disk: Disk = "model",
    shrinks: Shrink = True,
    folder: Folder = Path(),
    replay: Replay = None,
    json: Json = False,
) -> None:
    """Simulate whole fleets, one history per seed, the same each time: the real cache and manager over virtual time,
    disks and one bucket, with faults, kills, wrong clocks and purges. safety: nothing wrong, purged or expired is
    served, and no bound is passed. liveness: besides, everything works again once all is well. engines: the same beside
    an engine per machine, with vLLM's connector. A history that fails is shrunk, and kept as a file for --replay."""
    if replay is not None:
        _replay(_read(replay), as_json=json)
        return
    first, last = _range(seeds)
    histories = (make_history(seed, mode, hosts, steps, disk) for seed in range(first, last + 1))
    count, failed, results = 0, list[Played](), _Sum()
    with counting(last + 1 - first, mode) as advance:
        for history in histories:
            played = play(history)
            count += 1
            results.add(played)
            advance()
            if played.failure:
                failed.append(shrink(played) if shrinks else played)
                if len(failed) >= FAILURES_MAX:
                    break
    files = [_keep(played, folder) for played in failed]
    found = {
        "mode": mode, "disk": disk, "seeds": f"{first}-{first + count - 1}", "hosts": hosts, "steps": steps,
        **results.figures(),
        "failures": [_described(played, file) for played, file in zip(failed, files, strict=True)],
    }  # fmt: skip
    if json:
        write_json(found)
    else:
        _show(found)
    if failed:
        raise typer.Exit(1)


class _Sum:
    """Of all histories. `digest`: two machines that played the same have the same."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._histories = self._served = self._turns = 0
        self._virtual_s = self._cpu_s = 0.0

    def add(self, played: Played) -> None:
        self._hash.update(played.digest.encode())
        self._histories += 1
        self._served += played.served
        self._turns += played.turns
        self._virtual_s += played.virtual_s
        self._cpu_s += played.cpu_s

    def figures(self) -> dict[str, Any]:
        return {
            "histories": self._histories,
            "blocks_served": self._served,
            "turns": self._turns,
            "virtual_hours": round(self._virtual_s / 3600, 2),
            "cpu_ms_per_history": round(1000 * self._cpu_s / max(1, self._histories), 1),
            "digest": self._hash.hexdigest()[:32],
        }


def _range(seeds: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,12})(?:-(\d{1,12}))?", seeds)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise InvalidRequest(f"--seeds {seeds!r}: one number, or the first and the last as in 0-1999")
    return int(match[1]), int(match[2] or match[1])


def _read(path: Path) -> History:
    try:
        return History.decode(path.read_bytes())
    except OSError as wrong:
        raise InvalidRequest(f"--replay {path} cannot be read: {wrong.strerror}") from None


def _keep(played: Played, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    history = played.history
    disk = "-disk" if history.disk == "real" else ""
    file = folder / f"sim-{history.mode}{disk}-{history.seed}.json"
    file.write_bytes(played.history.encode())
    return file


def _described(played: Played, file: Path) -> dict[str, Any]:
    return {
        "seed": played.history.seed,
        "failure": played.failure,
        "where": played.where,
        "steps": len(played.history.steps),
        "command": f"kvtier sim --replay {file}",
    }


def _replay(history: History, *, as_json: bool) -> None:
    played = play(history)
    if as_json:
        write_json({"failure": played.failure, "where": played.where, "digest": played.digest,
                    "history": played.lines})  # fmt: skip
    else:
        out = console()
        for line in played.lines:
            out.print(line)
        out.print(f"{played.failure or 'every promise holds'}\n{played.where}")
    if played.failure:
        raise typer.Exit(1)


def _show(found: dict[str, Any]) -> None:
    out = console()
    for failure in found["failures"]:
        out.print(f"seed {failure['seed']}, {failure['steps']} steps: {failure['failure']}")
        out.print(f"    {failure['where']}\n    {failure['command']}")
    columns = ["mode", "disk", "seeds", "failed", "blocks served", "virtual hours", "CPU ms per seed", "digest"]
    row: Sequence[object] = [
        found["mode"], found["disk"], found["seeds"], len(found["failures"]), found["blocks_served"],
        found["virtual_hours"], found["cpu_ms_per_history"], found["digest"],
    ]  # fmt: skip
    write_table(columns, [row])
