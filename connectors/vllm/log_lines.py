"""kvtier's log lines beside vLLM's."""

from __future__ import annotations

import logging


def speak_as_vllm() -> None:
    """kvtier's log lines in vLLM's format, where nobody has given them a place."""
    ours, engines = logging.getLogger("kvtier"), logging.getLogger("vllm")
    if logging.getLogger().handlers or ours.handlers:
        return
    for handler in engines.handlers:
        ours.addHandler(handler)
    if ours.level == logging.NOTSET and logging.NOTSET < engines.level < logging.WARNING:
        ours.setLevel(engines.level)
