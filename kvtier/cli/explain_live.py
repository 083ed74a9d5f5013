"""`kvtier explain --engine`: why a request of a running engine was not given more, and the dearest breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvtier.cli.ask import ask, shown
from kvtier.cli.output import console, write_json, write_table
from kvtier.cli.prompt_break import ADVICE, Part, PromptText, class_for, compare
from kvtier.errors import FormatError
from kvtier.units import format_duration

TEXT_CAUSES = ("timestamp", "identifier", "unsorted_keys", "truncated_history")
"""Causes that the text around the place may show, and token ids cannot."""

CAUSES = {
    "none": ADVICE["none"],
    "value": "a few tokens change, such as a time or an identifier: put them behind what stays",
    "truncated_history": ADVICE["truncated_history"],
    "inserted": "text was put before what stays: append it instead",
    "changed_part": "a part was written anew, and the same text follows: put what changes behind what stays",
    "changed": "the prompts differ from here on",
    "other_scope": "the requests have other salts, adapters or isolated classes, which share nothing",
    "other_contents": "equal tokens have other contents beside them, such as images",
}  # fmt: skip

REMEDIES = {
    "absent": "they were stored nowhere, or too long ago: look at `offload` and the tiers' sizes",
    "expired": "their terms ended: a longer retention class",
    "evicted": "they made room for others: a larger tier",
    "quota": "their scope had no room: retention.quota",
    "spill_lost": "the engine reused its memory first: offload.spill_ahead, dirty_max_age",
    "late": "they came too late: deadlines, or a faster tier",
    "no_room": "G2 had no room to load them into: a larger tiers.g2.capacity",
    "slower": "loading would have taken longer than computing",
    "not_read": "the request was not to read, or ran beside the other one",
}

NO_ANSWER = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
"""Of reading an answer with other fields, or other values in them."""

Decode = Callable[[Sequence[int]], str]


def explain_request(source: Path, name: str, earlier: str | None, decode: Decode | None, *, as_json: bool) -> None:
    """Of the latest requests, the one with this id, beside `earlier` or the one that its prompt is most like."""
    question = {"ask": "request", "name": name, "earlier": earlier, "excerpt": decode is not None}
    found = ask(source, question)
    try:
        if "cause" in found:
            found["kept_by"] = class_for(float(found["pause_s"]))
        if decode is not None and (excerpt := found.pop("excerpt", None)):
            _read_texts(found, *(decode([int(token) for token in excerpt[each]]) for each in ("earlier", "later")))
        if as_json:
            write_json({key: value for key, value in found.items() if key != "kvtier_answer"})
            return
        for line in _lines(found):
            console().print(line, soft_wrap=True)
    except NO_ANSWER as wrong:
        raise FormatError(f"{source}: what answers is no trace socket of this release of kvtier: {wrong!r}") from None


def _read_texts(found: dict[str, Any], earlier: str, later: str) -> None:
    """Put the texts around the place into the answer, and the cause that they show."""
    texts = compare(PromptText((Part("prompt", earlier),)), PromptText((Part("prompt", later),)))
    found["texts"] = {"earlier": texts.earlier, "later": texts.later}
    if texts.cause in TEXT_CAUSES and found["cause"] not in ("none", "other_scope", "other_contents"):
        found["cause"] = texts.cause


def _lines(found: dict[str, Any]) -> list[str]:
    request, earlier = found["request"], found["earlier"]
    given = ", ".join(f"{int(tokens):,} from {shown(tier)}" for tier, tokens in request["given"].items())
    why = f" ({shown(request['why'])})" if request["why"] else ""
    lines = [
        f"{shown(request['name'])}, {_time(request['ago_s'])} ago: {request['input_tokens']:,} "
        f"tokens, {given or 'none from a cache'}, {request['computed_tokens']:,} computed{why}."
    ]
    times = [
        f"{text} {float(request[key]):.3f} s"
        for key, text in (("placed_s", "it was given blocks after"), ("waited_s", "waited for lower tiers for"),
                          ("first_s", "had its first token after"))
        if request[key]
    ]  # fmt: skip
    if times:
        lines.append(f"Since its arrival {', '.join(times)}.")
    if earlier is None:
        return [*lines, f"None of the latest {found['requests']:,} requests has a prompt like it."]
    lines.append(
        f"Most like it: {shown(earlier['name'])}, {_time(found['pause_s'])} before, with "
        f"{earlier['input_tokens']:,} tokens. They agree for {found['same_tokens']:,} tokens."
    )
    if "texts" in found:
        lines += [f"  {name}: {found['texts'][name]!r}" for name in ("earlier", "later") if found["texts"][name]]
    cause = shown(found["cause"])
    lines.append(f"Likely cause: {_named(cause)}; {CAUSES.get(cause) or ADVICE.get(cause, cause)}.")
    if found["parted_tokens"]:
        lines.append(f"Computed again behind that place: about {found['parted_tokens']:,} tokens that both have.")
    if found["gone_tokens"]:
        reason = shown(request["why"] or "not_read")
        lines.append(
            f"Computed again before it: {found['gone_tokens']:,} tokens, {_named(reason)}; "
            f"{REMEDIES.get(reason, 'see docs/operations.md')}."
        )
        kept = f"the class {found['kept_by']} keeps" if found["kept_by"] else "no built-in class keeps"
        lines.append(f"Between the two lie {_time(found['pause_s'])}: {kept} blocks that long.")
    if found["lost_seconds"]:
        lines.append(f"That took some {float(found['lost_seconds']):g} s of prefill.")
    return lines


def explain_top(source: Path, *, as_json: bool) -> None:
    """The breaks among the latest requests that cost most tokens."""
    found = ask(source, {"ask": "breaks"})
    try:
        if as_json:
            write_json({key: value for key, value in found.items() if key != "kvtier_answer"})
            return
        since = _time(found["since_s"]) if found["since_s"] is not None else "no time"
        console().print(f"The latest {found['requests']:,} requests, of {since}.")
        rows = [
            [shown(row["prefix"]), int(row["same_tokens"]), _named(row["cause"]), int(row["requests"]),
             int(row["lost_tokens"]), "" if row["lost_seconds"] is None else f"{float(row['lost_seconds']):g}"]
            for row in found["breaks"]
        ]  # fmt: skip
        if not rows:
            console().print("None of them computed what an earlier one had had.")
            return
        write_table(["prefix", "tokens of it", "cause", "requests", "lost tokens", "lost s"], rows)
        for row in found["breaks"]:
            advice = CAUSES.get(str(row["cause"])) or REMEDIES.get(str(row["cause"]), "see docs/operations.md")
            console().print(f"{shown(row['prefix'])} {_named(row['cause'])}: {advice}. Last in {shown(row['latest'])}.",
                            soft_wrap=True)  # fmt: skip
    except NO_ANSWER as wrong:
        raise FormatError(f"{source}: what answers is no trace socket of this release of kvtier: {wrong!r}") from None


def _named(cause: object) -> str:
    return shown(cause).replace("_", " ")


def _time(seconds: Any) -> str:
    return format_duration(round(float(seconds)))
