"""kvtier's log lines beside vLLM's."""

from __future__ import annotations

import logging


def speak_as_vllm() -> None:
    """kvtier's log lines in vLLM's format, where nobody has given them a place, and at its level."""
    ours, engines = logging.getLogger("kvtier"), logging.getLogger("vllm")
    if logging.getLogger().handlers:
        return
    if not ours.handlers:
        for handler in engines.handlers:
            ours.addHandler(handler)
    if ours.level == logging.NOTSET and logging.NOTSET < engines.level < logging.WARNING:
        ours.setLevel(engines.level)
