"""A boundary of a request, and what is known of one request's blocks beside its full group's: see `boundary_blocks`."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.connectors.vllm.confirm import Chain, Track

Found = tuple[int, int, object]
"""Group, block, and the name under which it was found."""


@dataclass(slots=True, eq=False)
class Boundary:
    """What the groups beside the full one need after `tokens` of a track. `chain` are the names of the blocks once it
    is ready: before, the engine may not know the last of the tokens yet, or put others in their place. `lost`: the
    engine has handed out one of the blocks."""

    track: Track
    life: int
    tokens: int
    chain: Chain
    blocks: list[int]
    groups: list[int]  # of each block: its place in `Groups.beside`
    step: int
    behind: list[Found]  # blocks that it was made of, and that are not known to be right
    held: bool = True
    lost: bool = False


@dataclass(slots=True, eq=False)
class Tables:
    """One request's tables of the groups beside the full one, 0 where there is no block, in one life of its track."""

    track: Track
    life: int
    tables: list[list[int]]
    begin: int = -1  # where it began to compute; -1: it has not
    began: int = -1  # in this step
    proved: bool = True  # what lies before `begin` is right, if `behind` is
    behind: list[Found] = field(default_factory=list)  # found there, and not known to be right yet
    noted: int = 0  # leading blocks that are known, or were not to be
    wanted: set[int] = field(default_factory=set)
    taken: list[int] = field(default_factory=list)  # boundaries that were held
    missed: set[int] = field(default_factory=set)  # those that could not be
    ended: tuple[int, ...] = ()  # the last boundaries at which a step left its states
    tails: dict[int, list[int]] = field(default_factory=dict)  # held, by boundary: see `_hold_tail`


@dataclass(frozen=True, slots=True, eq=False)
class Left:
    """Blocks of a request that is over, as it left them: depth, group, block and name of each. They are known to be
    right as far as the request's last steps, up to `step`, are found to be."""

    track: Track
    life: int
    step: int
    names: list[tuple[int, int, int, object]]
