"""The GPU tests of tests/kernels as rows: one per test, in whatever process. A part of `make gpu-check`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu.rows import AGAIN, Rows

TESTS = Path(__file__).parents[2] / "tests" / "kernels" / "test_gpu.py"


class Reporter:
    """Writes a row per test, and leaves out those that have one."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def pytest_configure(self, config: Any) -> None:
        config.addinivalue_line("markers", "timeout: the supervisor ends what does not end")

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        done = [item for item in items if _name(item.nodeid) in self._rows.done]
        items[:] = [item for item in items if item not in done]
        config.hook.pytest_deselected(items=done)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._rows.begin(_name(nodeid))

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = _name(report.nodeid)
        if report.failed:
            lines = report.longreprtext.strip().splitlines() or ["failed"]
            error = next((line[1:].strip() for line in reversed(lines) if line.startswith("E ")), lines[-1])
            self._rows.end(name, {"error": error[:500], "detail": report.longreprtext[-3000:]})
        elif report.skipped:
            self._rows.end(name, {"skipped": str(report.longrepr[2]) if report.longrepr else "skipped"})
        elif report.when == "call":
            self._rows.end(name, {"passed": True})


def measure(device: str, rows: Rows, *, tiny: bool) -> None:
    """Run what is left. After a failure the process ends, so that its device cannot spoil later tests."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # whatever is installed there: these tests need pytest alone
    options = ["-q", "-x", "-m", "gpu", "-p", "no:cacheprovider", "--no-header"]
    code = pytest.main([str(TESTS), *options], plugins=[Reporter(rows)])
    if code == pytest.ExitCode.TESTS_FAILED:
        sys.exit(AGAIN)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        sys.exit(1)


def _name(nodeid: str) -> str:
    return nodeid.rpartition("::")[2]
