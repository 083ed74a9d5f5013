"""`kvtier explain`: where two prompts part, why, and what it costs; of files, or of a running engine's requests."""

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
    earlier: Annotated[
        str,
        typer.Argument(help="A file with a prompt: text, token ids or a request's body as JSON.", show_default=False),
    ] = "",
    later: Annotated[
        str,
        typer.Argument(help="That of the prompt that should have found it; - is standard input.", show_default=False),
    ] = "",
    engine: Annotated[
        Path | None,
        typer.Option(
            help="The YAML file or trace.socket of a running engine: EARLIER and LATER are ids of its requests; "
            "one alone is set beside the one that it is most like."
        ),
    ] = None,
    top: Annotated[bool, typer.Option("--top", help="With --engine: the ten dearest breaks.")] = False,
    tokenizer: Annotated[Path | None, typer.Option(help="A checkpoint's directory, to count tokens exactly.")] = None,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
    pause: Annotated[str, typer.Option(help="Time between the two; else `created` of the bodies.")] = "",
    prefill_rate: Annotated[float | None, typer.Option(min=1, help="Tokens/s that the engine prefills.")] = None,
    json: Json = False,
) -> None:
    """Say where the later prompt leaves the earlier one, the likely cause, and the tokens that it costs."""
    if engine is not None and (pause or prefill_rate is not None):
        raise InvalidRequest("--pause and --prefill-rate are for files: an engine knows them of its own requests")
    loaded = _tokenizer_of(tokenizer) if tokenizer is not None else None
    if engine is not None:
        _explain_live(engine, earlier, later, loaded, top=top, as_json=json)
        return
    if top or not later:
        raise InvalidRequest("name two prompts, EARLIER and LATER; or --engine, with a request's id or --top")
    one, two = (read_prompt(_read(Path(path)), path) for path in (earlier, later))
    tokens_of = None if loaded is None else _tokens_of(loaded)
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


def _explain_live(engine: Path, earlier: str, later: str, tokenizer: Any, *, top: bool, as_json: bool) -> None:
    from kvtier.cli.explain_live import explain_request, explain_top

    if top == bool(earlier):
        raise InvalidRequest("--engine needs the id of a request, or --top")
    if top:
        explain_top(engine, as_json=as_json)
        return
    one, other = (earlier, later) if later else (None, earlier)
    explain_request(engine, other, one, None if tokenizer is None else tokenizer.decode, as_json=as_json)


def _tokens_of(tokenizer: Any) -> Callable[[PromptText], Sequence[int]]:
    return lambda prompt: tokenizer.encode(prompt.text, add_special_tokens=False)


def _tokenizer_of(folder: Path) -> Any:
    """A checkpoint's own tokenizer. Reads its files, runs no code of it, and asks no network."""
    if not folder.is_dir():
        raise InvalidRequest(f"--tokenizer {folder}: not a directory with a checkpoint's tokenizer")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"--tokenizer {folder}: {error}") from None


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
