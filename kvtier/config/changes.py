"""Differences between two configurations, and which of them a running cache can take over."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from kvtier.config.schema import Config
from kvtier.errors import ConfigError
from kvtier.units import format_size

RELOADABLE = (
    "deadlines",
    "log",
    "offload.min_prefix",
    "offload.store_threshold",
    "retention.classes",
    "retention.default",
    "tiers.g2.capacity",
    "tiers.g3.capacity",
    "tiers.g3.write_rate",
    "trace.spans",
)
"""Keys, and sections of them, whose new values hold from the next call on; capacities follow in the background. The
others size files or connections, or are part of the data's identity."""


def reloadable_changes(old: Config, new: Config, opened: Config | None = None) -> list[str]:
    """Dotted keys in which `new` differs. Pure. Raises ConfigError that names those which need a restart. `opened`: the
    configuration that the cache was opened with; None: `old`."""
    changed = sorted(_changed(old, new, ""))
    fixed = [key for key in changed if not any(f"{key}.".startswith(f"{each}.") for each in RELOADABLE)]
    g2_most, before, after = (opened or old).tiers.g2.capacity, old.tiers.g3, new.tiers.g3
    if new.tiers.g2.capacity > g2_most:
        fixed.append("tiers.g2.capacity")
    if before is not None and after is not None and after.capacity < before.capacity:
        fixed.append("tiers.g3.capacity")
    if fixed:
        raise ConfigError(
            f"{', '.join(sorted(fixed))}: changes at a start only; a running cache takes over {', '.join(RELOADABLE)}, "
            f"G2's capacity up to {format_size(g2_most)}, as it was opened, and G3's if it is larger. "
            "Nothing was changed"
        )
    return changed


def _changed(old: BaseModel, new: BaseModel, prefix: str) -> Iterator[str]:
    # By attribute: a dump hides secrets, and two of them would look the same.
    for name in type(old).model_fields:
        before, after = getattr(old, name), getattr(new, name)
        if before == after:
            continue
        if isinstance(before, BaseModel) and isinstance(after, BaseModel):
            yield from _changed(before, after, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
