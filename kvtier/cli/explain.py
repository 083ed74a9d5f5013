"""`kvtier explain`: where two prompts part, why, and what it costs."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.cli.output import Json, console, write_json
from kvtier.cli.prompt_break import Break, PromptText, compare, read_prompt
from kvtier.errors import InvalidRequest
from kvtier.units import format_duration, parse_duration

PROMPT_BYTES_MAX = 64 << 20


def explain(
    earlier: Annotated[Path, typer.Argument(help="A prompt: text, token ids or a request's body as JSON.")],
    later: Annotated[Path, typer.Argument(help="The prompt that should have found it; - is standard input.")],
    tokenizer: Annotated[Path | None, typer.Option(help="A checkpoint's directory, to count tokens exactly.")] = None,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
    pause: Annotated[str, typer.Option(help="Time between the two; else `created` of the bodies.")] = "",
    prefill_rate: Annotated[float | None, typer.Option(min=1, help="Tokens/s that the engine prefills.")] = None,
    json: Json = False,
) -> None:
    """Say where the later prompt leaves the earlier one, the likely cause, and the tokens that it costs."""
    one, two = (read_prompt(_read(path), str(path)) for path in (earlier, later))
    tokens_of = _tokens_of(tokenizer) if tokenizer is not None else None
    found = compare(one, two, tokens_of, block_tokens, parse_duration(pause) if pause else None)
    exact = tokens_of is not None or (one.tokens is not None and two.tokens is not None)
    seconds = None if prefill_rate is None else round(found.lost_tokens / prefill_rate, 3)
    if json:
        write_json({**dataclasses.asdict(found), "exact": exact, "lost_seconds": seconds})
    else:
        _print(found, exact=exact, seconds=seconds)


def _read(path: Path) -> str:
    try:
        if str(path) == "-":
            raw = sys.stdin.buffer.read(PROMPT_BYTES_MAX + 1)
        else:
            with path.open("rb") as file:
                raw = file.read(PROMPT_BYTES_MAX + 1)
        if len(raw) > PROMPT_BYTES_MAX:
            raise InvalidRequest(f"{path}: a prompt has at most {PROMPT_BYTES_MAX >> 20} MiB")
        return raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise InvalidRequest(f"{path} cannot be read: {reason}") from None


def _tokens_of(folder: Path) -> Callable[[PromptText], Sequence[int]]:
    """A checkpoint's own tokenizer. Reads its files, runs no code of it, and asks no network."""
    if not folder.is_dir():
        raise InvalidRequest(f"--tokenizer {folder}: not a directory with a checkpoint's tokenizer")
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"--tokenizer {folder}: {error}") from None
    return lambda prompt: tokenizer.encode(prompt.text, add_special_tokens=False)


def _print(found: Break, *, exact: bool, seconds: float | None) -> None:
    out, about = console(), "" if exact else "about "
    out.print(
        f"The prompts agree for {about}{found.same_tokens:,} tokens; the earlier has {found.earlier_tokens:,}, "
        f"the later {found.later_tokens:,}."
    )
    if found.part:
        out.print(f"They part in {found.part}:")
        out.print(f"  earlier: {found.earlier!r}")
        out.print(f"  later:   {found.later!r}")
    out.print(f"Likely cause: {found.cause.replace('_', ' ')}; {found.advice}.")
    if found.lost_tokens:
        cost = "" if seconds is None else f", {seconds:g} s of prefill"
        out.print(f"Computed again though the earlier prompt had as many: {about}{found.lost_tokens:,} tokens{cost}.")
    if found.pause_s is not None:
        kept = f"the class {found.kept_by} keeps" if found.kept_by else "no built-in class keeps"
        out.print(f"Between them lie {format_duration(found.pause_s)}: {kept} blocks that long.")
