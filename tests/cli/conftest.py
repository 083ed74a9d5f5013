"""Running commands as a shell would, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from kvtier.cli import main


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command left: exit status and what it wrote."""

    status: int
    out: str
    err: str

    @property
    def told(self) -> str:
        """The output without the line breaks and borders that a table or a narrow terminal puts into it."""
        return " ".join(self.out.replace("│", " ").split())

    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    def run(*words: object) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        written = capsys.readouterr()
        code = ended.value.code
        return Ran(code if isinstance(code, int) else 0, written.out, written.err)

    return run
