"""`kvtier …`: one plain function per command, imported only when it runs.

COMMANDS is the table of them: a command's words, the function behind it, one line of help. The function's docstring
is the help of the command itself, its parameters are the options (`typer`); every command takes `--json` and then
prints one JSON object, also for an error. An error is one line on standard error; `kvtier.cli.exits` has the exit
statuses.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import kvtier

if TYPE_CHECKING:
    import typer

    from kvtier.cli.exits import Ending


class Command(NamedTuple):
    """`words` as typed, `target` as module:function, `help` in one line."""

    words: str
    target: str
    help: str


COMMANDS = (
    Command("demo", "kvtier.cli.demo:demo", "Run the four tiers with a real model, over two processes."),
    Command("init", "kvtier.cli.init:init", "Write a configuration for this machine, with every key explained."),
    Command("config check", "kvtier.cli.config:check", "Validate a configuration file."),
    Command("config show", "kvtier.cli.config:show", "Print a configuration with all defaults, secrets hidden."),
    Command("config schema", "kvtier.cli.config:schema", "Print every key with its type, default and meaning."),
    Command("doctor", "kvtier.cli.doctor:doctor", "Check this machine against a configuration, or explain misses."),
    Command("g3 inspect", "kvtier.cli.g3:inspect", "Show the contents of a G3 store."),
    Command("g3 doctor", "kvtier.cli.g3:doctor", "Say what ails a G3 store, and what helps."),
    Command("g3 verify", "kvtier.cli.g3:verify", "Check every block of a G3 store against its digest."),
    Command("g3 scrub", "kvtier.cli.g3:scrub", "Verify a G3 store and delete damaged blocks."),
    Command("g3 gc", "kvtier.cli.g3:gc", "Delete expired and purged blocks, free abandoned slots, or resize."),
    Command("g4 lifecycle", "kvtier.cli.g4:lifecycle", "Print or set the bucket's lifecycle rule."),
    Command("keys list", "kvtier.cli.keys:listing", "List the keyring and the tenants' data keys."),
    Command("keys rotate", "kvtier.cli.keys:rotate", "Wrap every tenant's data key by the keyring's active key."),
    Command("keys destroy", "kvtier.cli.keys:destroy", "Destroy a tenant's data key: its encrypted blocks are lost."),
    Command("pin create", "kvtier.cli.pin:create", "Retain a prompt's blocks until a time, by name."),
    Command("pin extend", "kvtier.cli.pin:extend", "Change when a pin ends."),
    Command("pin delete", "kvtier.cli.pin:delete", "Delete a pin."),
    Command("pin list", "kvtier.cli.pin:listing", "List the pins of a namespace."),
    Command("namespace", "kvtier.cli.namespace:namespace", "Print or save the namespace of a G3 store or engine."),
    Command("reload", "kvtier.cli.reload:reload", "Have a running engine take over what its YAML file changes."),
    Command("purge", "kvtier.cli.purge:purge", "Delete a tenant's blocks from every tier and replica."),
    Command("top", "kvtier.cli.top:top", "Show live metrics of a running cache."),
    Command("trace convert", "kvtier.cli.trace:convert", "Write a trace of another format as kvtier's or Mooncake's."),
    Command("trace record", "kvtier.cli.trace:record", "Record the requests of a running cache, for `plan`."),
    Command("plan", "kvtier.cli.plan:plan", "Compute hit rate and cost over tier sizes."),
    Command("explain", "kvtier.cli.explain:explain", "Say where two prompts part, why, and what it costs."),
    Command("sim", "kvtier.cli.sim:sim", "Simulate fleets over virtual time and faults, and check every promise."),
    Command("bench index", "kvtier.cli.bench.index:index", "Benchmark hashing, matching and the block pool."),
    Command("bench tiers", "kvtier.cli.bench.tiers:tiers", "Benchmark a tier against the library and device below it."),
    Command("bench peers", "kvtier.cli.bench.peers:peers", "Benchmark an engine with kvtier and with other caches."),
    Command("bench retention simulate", "kvtier.cli.bench.retention:simulate", "Simulate a cache on a trace."),
    Command("bench retention replay", "kvtier.cli.bench.retention:replay", "Replay a trace with real bytes."),
    Command("bench retention report", "kvtier.cli.bench.retention:report", "Write an HTML report on a trace."),
    Command("bench retention compare", "kvtier.cli.bench.retention:compare", "Compare eviction policies on a trace."),
)

GROUPS = {
    "config": "Validate, print and describe configurations.",
    "g3": "Inspect and maintain a G3 store, also while engines use it.",
    "g4": "Maintain object storage.",
    "keys": "List, rotate and destroy the keys of encryption.",
    "pin": "Manage named pins in a shared bucket or directory.",
    "trace": "Record what a running cache is asked for; read other traces.",
    "bench": "Benchmark tiers, the index, engines and retention.",
    "bench retention": "Measure what longer retention saves on a trace.",
}

RENAMED = {
    "inspect": ("g3 inspect", "kvtier.cli.g3:inspect"),
    "verify": ("g3 verify", "kvtier.cli.g3:verify"),
    "scrub": ("g3 scrub", "kvtier.cli.g3:scrub"),
    "gc": ("g3 gc", "kvtier.cli.g3:gc"),
    "bench retention": ("bench retention simulate, replay or report", "kvtier.cli.bench.retention:retention"),
}
"""Old name: (present name, function). They work for one release and are in no help. An old name that is a group today
is meant where options follow it."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command. Exits the process; blocks as long as the command does."""
    from kvtier.cli.signals import end_by, unwinding

    _prepare_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    name, args = "kvtier", words
    if old := renamed(words):
        print(f"kvtier: `kvtier {old}` is now `kvtier {RENAMED[old][0]}`", file=sys.stderr)
        name, args = f"kvtier {old}", words[len(old.split()) :]
    status = 0
    with unwinding() as signals:
        try:
            status = _run(words, name, args)
            sys.stdout.flush()
        except BrokenPipeError:
            pass  # the reader of our output has closed it (`kvtier … | head`): no error
        except OSError as error:
            status = _report(_ending(error), error, as_json=False)
        for stream in (sys.stdout, sys.stderr):
            _let_go(stream)
    if signals:
        end_by(signals[0])
    sys.exit(status)


def _prepare_streams() -> None:
    """Have all three standard streams, and writes that fail for no letter. A closed one goes where nobody reads: else
    the next file that is opened has its number, and what is printed may go there."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for as long as the process lives
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _let_go(stream: TextIO) -> None:
    """What cannot be written is not tried again as the interpreter ends."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _run(words: Sequence[str], name: str, args: Sequence[str]) -> int:
    """The exit status of a command; its error is printed."""
    import typer

    # Typer's own entry decides on exit statuses and prints errors in boxes; its command does neither.
    try:
        command = typer.main.get_command(build(words))
        with command.make_context(name, list(args)) as context:
            command.invoke(context)
    except typer.Exit as ended:
        return ended.exit_code
    except BrokenPipeError:
        raise
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # what rich makes of it
            raise BrokenPipeError from None
        raise
    except (Exception, KeyboardInterrupt) as error:
        return _report(_ending(error), error, as_json="--json" in words)
    return 0


def _ending(error: BaseException) -> Ending:
    import typer

    from kvtier.cli.exits import Ending, Exit, ending_of

    wrong_usage = typer.BadParameter.__mro__[1]  # the base of all such errors, whichever Click typer brings
    if not isinstance(error, wrong_usage):
        return ending_of(error)
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "kvtier"
    # A group without a command has printed its help instead of a message.
    message = " ".join(error.format_message().split()).rstrip(".") or "No command given"  # type: ignore[attr-defined]
    message = message.replace(": Value error, ", ": ")  # what reads a choice calls each of its errors so
    return Ending(Exit.MISTAKE, "UsageError", f"{message}; see `{where} --help`")


def _report(ending: Ending, error: BaseException, *, as_json: bool) -> int:
    from kvtier.cli.exits import Exit
    from kvtier.units import printable

    if ending.status is Exit.DEFECT:
        import traceback

        with suppress(OSError):
            traceback.print_exception(error)
    if as_json:
        import json

        found = {"kind": ending.kind, "message": ending.line, "status": int(ending.status)}
        with suppress(OSError):
            print(json.dumps({"error": found}), flush=True)
    with suppress(OSError):
        print(f"kvtier: {printable(ending.line)}", file=sys.stderr, flush=True)  # it may name what others have named
    return ending.status


def renamed(words: Sequence[str]) -> str | None:
    """The key of RENAMED that `words` begin with. Pure."""
    for old in RENAMED:
        typed = old.split()
        rest = words[len(typed) :]
        with_options = bool(rest) and rest[0].startswith("-") and rest[0] != "--help"
        if [*words[: len(typed)]] == typed and (with_options or old not in GROUPS):
            return old
    return None


def build(words: Sequence[str]) -> typer.Typer:
    """The application that can run `words`: it imports the command that they name, the rest are names only."""
    import typer

    options: dict[str, Any] = {"add_completion": False, "no_args_is_help": True, "pretty_exceptions_enable": False}
    root = typer.Typer(help="A tiered KV-cache offload block manager for LLM inference.", **options)
    if old := renamed(words):
        root.command()(_load(RENAMED[old][1]))
        return root

    @root.callback(invoke_without_command=True)
    def _version(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
        if version:
            print(kvtier.__version__)
            raise typer.Exit

    groups = {"": root}
    for group, help in GROUPS.items():
        groups[group] = typer.Typer(help=help, **options)
        above, _, name = group.rpartition(" ")
        groups[above].add_typer(groups[group], name=name)
    named = " ".join(word for word in words if not word.startswith("-"))
    for command in COMMANDS:
        group, _, name = command.words.rpartition(" ")
        wanted = f"{named} ".startswith(f"{command.words} ")
        function = _load(command.target) if wanted else _absent
        groups[group].command(name, help=function.__doc__ or command.help, short_help=command.help)(function)
    return root


def _load(target: str) -> Any:
    import importlib

    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)


def _absent() -> None:
    raise AssertionError("only the named command is run")
