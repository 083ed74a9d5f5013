"""One SGLang engine on the CPU in a process of its own, for tests and benchmarks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kvtier.testing import Child
from tests.connectors.support.forked import Template

FORKED = "forked"
HERE = Path(__file__).parent
IMPORTED = ("engine_host", "sglang.srt.managers.scheduler", "sglang.srt.managers.detokenizer_manager",
            "sglang.srt.models.registry")  # fmt: skip
"""Of a template. The host first: it puts stand-ins where something is missing."""
START_S = 420.0
ANSWER_S = 240.0


class EngineHost:
    """An engine, asked as engine_host.py says. `close` or `kill` ends it with all its processes."""

    def __init__(self, arguments: dict[str, Any], template: Template | None = None) -> None:
        """Forked from `template`, unless the environment is this test's own, or the engine has several ranks."""
        ranks = {arguments.get(size, 1) for size in ("tp_size", "dp_size", "pp_size")}
        forked = template is not None and template.fits() and ranks == {1}
        command = [sys.executable, "-P", str(HERE / "engine_host.py"), json.dumps(arguments)]
        if template is not None and forked:
            self._child = Child([*command, FORKED], START_S, template.start)
        else:
            self._child = Child(command, START_S)
        self.process, self.kill, self.last_words = self._child.process, self._child.kill, self._child.last_words

    def ask(self, **order: Any) -> Any:
        return self._child.ask(order, ANSWER_S)

    def generate(self, *prompts: list[int], **order: Any) -> list[dict[str, Any]]:
        answers = self.ask(do="generate", prompts=list(prompts), **order)
        assert isinstance(answers, list), answers
        return answers

    def flush(self) -> None:
        assert self.ask(do="flush") == "flushed"

    def close(self) -> None:
        if self.process.poll() is None:
            self._child.end(60)
