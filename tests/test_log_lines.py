"""Level and form of kvtier's log lines; without a configuration they are the application's."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest

import kvtier
from kvtier.config import Config
from kvtier.log_lines import set_log_lines
from kvtier.testing import sample_namespace

OURS = logging.getLogger("kvtier")
BASE = {"tiers": {"g2": {"capacity": "1MiB"}}}


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    before = OURS.level, list(OURS.handlers), OURS.propagate
    yield
    set_log_lines("auto", "auto")
    assert (OURS.level, OURS.handlers, OURS.propagate) == before, "auto gives back what the application had set"


def with_log(**log: str) -> Config:
    return Config.parse({**BASE, "log": log})


def test_a_line_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    set_log_lines("info", "json")
    set_log_lines("info", "json")
    try:
        raise OSError("line\nbreak")
    except OSError:
        logging.getLogger("kvtier.tiers").exception("a %s\nb", "ü")
    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert found["level"] == "error" and found["logger"] == "kvtier.tiers" and found["message"] == "a ü\nb"
    assert "OSError" in found["error"] and found["time"].endswith("+00:00") and found["process"] > 0


def test_no_message_writes_to_a_terminal_or_breaks_the_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of files and words of servers are in messages; a container's standard error is often plain ASCII."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, "ascii", errors="backslashreplace", write_through=True))
    set_log_lines("info", "json")
    message = "ü \udc80 \x1b[2J \x9b2J \u2028 \U0001f600"
    logging.getLogger("kvtier.tiers").warning(message)
    (line,) = raw.getvalue().decode().splitlines()
    assert json.loads(line)["message"] == message and "\x1b" not in line


def test_a_reload_changes_them_and_auto_gives_them_back(capsys: pytest.CaptureFixture[str]) -> None:
    with kvtier.open(Config.parse(BASE), sample_namespace(4096)) as cache:
        assert OURS.level == logging.NOTSET
        assert cache.reload(with_log(level="debug", format="json")) == ["log.format", "log.level"]
        assert OURS.level == logging.DEBUG
        assert json.loads(capsys.readouterr().err.splitlines()[-1])["message"].startswith("configuration reloaded")
        cache.reload(with_log(level="error", format="json"))
        logging.getLogger("kvtier.tiers").warning("no")
        assert not capsys.readouterr().err
        cache.reload(Config.parse(BASE))
        assert OURS.level == logging.NOTSET and OURS.propagate
