"""Look-ups and plans of promotions as spans (`kvtier.spans`)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvtier.manager.plan import Plan, Where
from kvtier.spans import span, spans_on

_TIERS = ("g2", "g3", "g4")
P = ParamSpec("P")
Self = TypeVar("Self")


def traced_lookup(
    locate: Callable[Concatenate[Self, P], Coroutine[Any, Any, list[Where]]],
) -> Callable[Concatenate[Self, P], Coroutine[Any, Any, list[Where]]]:
    """`locate` in a span with the blocks that each tier has."""

    @wraps(locate)
    async def inside(self: Self, /, *arguments: P.args, **named: P.kwargs) -> list[Where]:
        with span("kv.lookup") as told:
            where = await locate(self, *arguments, **named)
            if spans_on():  # a chain may be long
                told(**{f"blocks.{tier}": count for tier in _TIERS if (count := where.count(tier))})
            return where

    return inside


def traced_plan(
    plan: Callable[Concatenate[Self, P], Coroutine[Any, Any, Plan]],
) -> Callable[Concatenate[Self, P], Coroutine[Any, Any, Plan]]:
    """`plan` in a span with its hit and loads."""

    @wraps(plan)
    async def inside(self: Self, /, *arguments: P.args, **named: P.kwargs) -> Plan:
        with span("kv.plan") as told:
            made = await plan(self, *arguments, **named)
            loads: dict[str, Any] = {f"load.{tier}": len(depths) for tier, depths in made.loads.items()}
            told(hit=made.hit, miss=str(made.miss or ""), **loads)
            return made

    return inside
