"""`kvtier …`: one plain function per command, imported when it is called for.

COMMANDS is the table of them: a command's words, the function behind it, one line of help. The function's
parameters are its options (`typer`); every command takes `--json` and then prints one JSON object. An error of
kvtier's own tree is one line on standard error and exit status 2; a check that finds something wrong exits with 1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtier.errors import KVTierError

if TYPE_CHECKING:
    import typer

USAGE_EXIT = 2
INTERRUPTED_EXIT = 130


class Command(NamedTuple):
    """`words` as typed, `target` as module:function, `help` in one line."""

    words: str
    target: str
    help: str


COMMANDS = (
    Command("demo", "kvtier.cli.demo:demo", "Show four tiers on a real model, over two processes."),
    Command("config check", "kvtier.cli.config:check", "Say whether a configuration is right."),
    Command("config show", "kvtier.cli.config:show", "Print a configuration with all defaults, secrets hidden."),
    Command("config schema", "kvtier.cli.config:schema", "Print every key, what it takes and what it means."),
    Command("doctor", "kvtier.cli.doctor:doctor", "Check this machine against a configuration, or explain misses."),
    Command("bench index", "kvtier.cli.bench.index:index", "Cost per block of hashing, matching and the pool."),
    Command("bench retention", "kvtier.cli.bench.retention:retention", "What keeping KV longer is worth on a trace."),
    Command("inspect", "kvtier.cli.g3:inspect", "Show what a G3 directory holds."),
    Command("verify", "kvtier.cli.g3:verify", "Read a G3 directory against its digests; change nothing."),
    Command("scrub", "kvtier.cli.g3:scrub", "Verify a G3 directory and delete what is damaged."),
    Command("gc", "kvtier.cli.g3:gc", "Free expired, purged and abandoned room of a G3 directory; resize it."),
    Command("purge", "kvtier.cli.purge:purge", "Drop a tenant's blocks from every tier and replica."),
    Command("bench peers", "kvtier.cli.bench.peers:peers", "What an engine computes with kvtier, and with others."),
    Command("pin create", "kvtier.cli.pin:create", "Keep a prompt's blocks for a time, by name."),
    Command("pin extend", "kvtier.cli.pin:extend", "Let a pin end later, or sooner."),
    Command("pin delete", "kvtier.cli.pin:delete", "End a pin."),
    Command("pin list", "kvtier.cli.pin:listing", "Show the pins of a namespace."),
    Command("bench tiers", "kvtier.cli.bench.tiers:tiers", "Throughput and cost of a tier beside what it stands on."),
    Command("g4 lifecycle", "kvtier.cli.g4:lifecycle", "The bucket rule that deletes what was missed."),
    Command("plan", "kvtier.cli.plan:plan", "Which tier sizes reach which hit rate, and at what price."),
    Command("top", "kvtier.cli.top:top", "Show what a running cache does."),
)

GROUPS = {
    "config": "Check, show and describe configurations.",
    "bench": "Measure tiers, index, transfers and retention.",
    "g4": "Look after object storage.",
    "pin": "Keep named prompts, in the bucket or directory that processes share.",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command. Exits the process; blocks as long as the command does."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        build(words)(args=words, prog_name="kvtier")
    except KVTierError as wrong:
        _report(wrong, as_json="--json" in words)
        sys.exit(USAGE_EXIT)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_EXIT)
    except BrokenPipeError:
        # The reader of our output has left (`kvtier … | head`): nothing is wrong, and nothing more can be said.
        sys.stderr.close()
        sys.exit(0)


def build(words: Sequence[str]) -> typer.Typer:
    """The application that can run `words`: only the command that they name is imported, the rest are names."""
    import typer

    options: dict[str, Any] = {"add_completion": False, "no_args_is_help": True, "pretty_exceptions_enable": False}
    root = typer.Typer(help="A tiered KV-cache offload block manager for LLM inference.", **options)

    @root.callback(invoke_without_command=True)
    def _version(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
        if version:
            from importlib.metadata import version as installed

            print(installed("kvtier"))
            raise typer.Exit

    groups: dict[str, typer.Typer] = {}
    named = [word for word in words if not word.startswith("-")]
    for command in COMMANDS:
        *group, name = command.words.split()
        app = root
        if group:
            if group[0] not in groups:
                groups[group[0]] = typer.Typer(help=GROUPS[group[0]], **options)
                root.add_typer(groups[group[0]], name=group[0])
            app = groups[group[0]]
        wanted = named[: len(group) + 1] == [*group, name]
        app.command(name, help=command.help)(_load(command.target) if wanted else _absent)
    return root


def _load(target: str) -> Any:
    import importlib

    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)


def _absent() -> None:
    raise AssertionError("only the named command is run")


def _report(wrong: KVTierError, *, as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps({"error": {"kind": type(wrong).__name__, "message": str(wrong)}}))
    print(f"kvtier: {wrong}", file=sys.stderr)
