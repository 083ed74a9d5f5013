"""How a conversation becomes the text that a model reads: plain, or by a chat model's own template."""

from __future__ import annotations

from typing import Any, Protocol

_QUESTION, _ANSWER, _NEXT = "kvtier-question", "kvtier-answer", "kvtier-next"


class Speech(Protocol):
    """Texts that follow one another: `opening`, then `turn`, an answer, `turn`, an answer …"""

    opening: str

    def turn(self, text: str, *, first: bool) -> str:
        """What stands between the opening, or the answer before, and the next answer."""


class PlainSpeech:
    """For a model that was never taught to chat."""

    def __init__(self, system: str) -> None:
        self.opening = system

    def turn(self, text: str, *, first: bool) -> str:
        return f"\n\nSkipper: {text}\n\nClerk: "


class ChatSpeech:
    """By the chat template of a tokenizer. Raises ValueError for one that has none, or changes what it is given."""

    def __init__(self, tokenizer: Any, system: str) -> None:
        before = [{"role": "system", "content": system}, {"role": "user", "content": _QUESTION}]
        after = [*before, {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _NEXT}]
        render = tokenizer.apply_chat_template
        begun = render(before, tokenize=False, add_generation_prompt=True)
        gone_on = render(after, tokenize=False, add_generation_prompt=True)
        try:
            self.opening, asked = begun.split(_QUESTION)
            answered, following = gone_on.split(_ANSWER)[1].split(_NEXT)
        except (ValueError, IndexError):
            raise ValueError("its chat template does not keep what is said") from None
        self._first, self._later = ("", asked), (answered, following)

    def turn(self, text: str, *, first: bool) -> str:
        before, after = self._first if first else self._later
        return f"{before}{text}{after}"
