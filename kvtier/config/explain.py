"""Errors of a configuration as single lines that name key, value and remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from kvtier.units import TEXT_CHARS_MAX, shorten

FAULTS_MAX = 4


def known_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key that `section` may hold; `*` stands for a name that the file chooses. Pure."""
    keys: list[str] = []
    for name, info in section.model_fields.items():
        path, kinds = f"{prefix}{name}", _parts(info.annotation)
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if inner is None:
            keys.append(path)
        else:
            named = getattr(info.annotation, "__origin__", None) is dict
            keys += known_keys(inner, f"{path}.*." if named else f"{path}.")
    return keys


def _parts(annotation: Any) -> list[Any]:
    return [annotation, *(inner for arg in getattr(annotation, "__args__", ()) for inner in _parts(arg))]


def explain(
    wrong: ValidationError, root: type[BaseModel], is_secret: Callable[[str], bool], place: Callable[[str], str] = str
) -> str:
    """The errors in `wrong`, at most FAULTS_MAX, each as `place` gives it back, joined by semicolons. Values of secret
    keys are left out. Pure."""
    faults = wrong.errors(include_url=False)
    # An unknown key is the likeliest cause of the rest.
    faults.sort(key=lambda fault: fault["type"] != "extra_forbidden")
    known = known_keys(root)
    lines = [
        place(_line(fault["type"], fault["loc"], fault["msg"], fault["input"], known, is_secret))
        for fault in faults[:FAULTS_MAX]
    ]
    more = len(faults) - len(lines)
    return "; ".join(lines) + (f"; and {more} more" if more else "")


def located(fault: str, places: Mapping[str, str], name: str) -> str:
    """`fault`, which begins with its dotted key, behind the place of that key, or of the nearest section above it in
    `places`; else behind `name`. Pure."""
    key = re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", fault.partition(": ")[0])
    while key and key not in places:
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    where = places.get(key, name)
    return f"{where}: {fault}" if where else fault


def _line(
    kind: str,
    place: tuple[int | str, ...],
    message: str,
    value: object,
    known: Iterable[str],
    is_secret: Callable[[str], bool],
) -> str:
    # Pydantic marks a fault in a mapping's key by a part of its own.
    key = ".".join(str(part)[:TEXT_CHARS_MAX] for part in place if part != "[key]")
    message = message.removeprefix("Value error, ")
    if message.startswith("."):
        # A section's own check names the member at fault.
        return f"{key}{message}".lstrip(".")
    key = key or "the configuration"
    if kind == "extra_forbidden":
        return f"{key}: unknown key{_nearest(key, known)}"
    if kind == "missing":
        return f"{key}: is required"
    if kind in ("model_type", "dict_type"):
        return f"{key}: must be a mapping of keys, got {shorten(value)}"
    if kind == "value_error" or is_secret(key):
        return f"{key}: {message}"
    return f"{key}: {message}, got {shorten(value)}"


def _nearest(key: str, known: Iterable[str]) -> str:
    """The known key nearest to an unknown one: the same word elsewhere, a neighbour like it, or any like it."""
    parent, _, leaf = key.rpartition(".")
    full = [_named_like(path, key) for path in known]
    places = {".".join(path.split(".")[:n]) for path in full for n in range(1, path.count(".") + 2)}
    neighbours = {p.rpartition(".")[2]: p for p in sorted(places) if p.rpartition(".")[0] == parent}
    anywhere = {p.rpartition(".")[2]: p for p in reversed(full)}
    for candidates, likeness in ((anywhere, 1.0), (neighbours, 0.5), (anywhere, 0.7)):
        if near := difflib.get_close_matches(leaf, candidates, 1, likeness):
            return f"; did you mean {candidates[near[0]]}?"
    (near_key,) = difflib.get_close_matches(leaf, neighbours or anywhere, 1, 0.0)
    nearest = (neighbours or anywhere)[near_key]
    return f"; the nearest is {nearest}, known here: {', '.join(neighbours)}" if neighbours else f"; nearest: {nearest}"


def _named_like(path: str, key: str) -> str:
    """`path` with its `*` filled from `key`, where they agree up to there."""
    head, star, tail = path.partition("*")
    if star and key.startswith(head):
        return head + key.removeprefix(head).partition(".")[0] + tail
    return path
