"""The model that the demo runs: built here from a seed, or loaded from a directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.demo.speech import ChatSpeech, PlainSpeech, Speech
from kvtier.errors import ConfigError, KVTierError

if TYPE_CHECKING:
    import torch

SPECIAL_IDS = 3  # padding, begin, end: bytes of text come after them
_VOCABULARY = 256 + SPECIAL_IDS
_PROBE_TOKENS = 48
_LEAST_CHANGE = 1e-3
_LEAST_DISTINCT = 12


@dataclass(frozen=True, slots=True)
class Subject:
    """A model in evaluation mode, how text becomes its token ids and these become text, and how it is spoken to. `gap`
    is the difference of the two best logits below which a full prefill may choose the other one (see
    `kvtier.demo.reference`). `ends`: tokens that end an answer; none: it ends at its greatest length."""

    model: Any
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    gap: float
    speech: Callable[[str], Speech] = PlainSpeech
    ends: frozenset[int] = frozenset()


def build(seed: int = 0) -> Subject:
    """A Llama of 9 M random weights that reads bytes. Raises KVTierError when its output ignores a prompt token.

    The initialiser is ten times as wide as usual: with the usual one greedy decoding hardly depends on the prompt, and
    comparing tokens would prove nothing.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)  # so small a model is no slower for it on two cores, and the same to the last bit
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.2,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).float().eval()
    refuse_deaf(model)
    return Subject(model, _bytes_to_ids, _ids_to_text, gap_of(torch.float32))


def load(path: Path, *, chats: bool = False) -> Subject:
    """The causal language model in the directory `path`, on a GPU if there is one; `chats`: spoken to by its own
    template. Raises ConfigError."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not path.is_dir():
        raise ConfigError(f"--model {path}: not a directory with a transformers checkpoint")
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", local_files_only=True, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--model {path}: {error}") from None
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    encode = partial(_encoded, tokenizer)
    subject = Subject(model, encode, partial(tokenizer.decode, skip_special_tokens=True), gap_of(model.dtype))
    if not chats:
        return subject
    if not tokenizer.chat_template or tokenizer.eos_token_id is None:
        raise ConfigError(f"--model {path}: it has no chat template; --real needs a model that can chat")
    try:
        ChatSpeech(tokenizer, "")
    except ValueError as error:
        raise ConfigError(f"--model {path}: {error}; take another model, or leave out --real") from None
    return replace(subject, speech=partial(ChatSpeech, tokenizer), ends=frozenset({tokenizer.eos_token_id}))


def _encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def gap_of(dtype: torch.dtype) -> float:
    """The tolerance for a type: two ways to add the same numbers differ by some units in its last place. Pure."""
    return 0.01 if dtype.itemsize >= 4 else 0.5


def _bytes_to_ids(text: str) -> list[int]:
    return [SPECIAL_IDS + byte for byte in text.encode()]


def _ids_to_text(ids: list[int]) -> str:
    return bytes(max(0, each - SPECIAL_IDS) for each in ids).decode(errors="replace")


def refuse_deaf(model: Any) -> None:
    """Change each prompt token in turn: the next token's logits must notice; and decoding must not run in circles."""
    import torch

    base = torch.arange(_PROBE_TOKENS).mul(7).remainder(256).add(SPECIAL_IDS)
    changed = base.repeat(_PROBE_TOKENS + 1, 1)
    for position in range(_PROBE_TOKENS):
        changed[position, position] = (base[position] - SPECIAL_IDS + 1) % 256 + SPECIAL_IDS
    with torch.inference_mode():
        logits = model(changed).logits[:, -1]
        output = model.generate(
            base[None], attention_mask=torch.ones_like(base[None]), max_new_tokens=24, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    least = float((logits[:-1] - logits[-1]).abs().amax(dim=1).min())
    distinct = len(set(output[0, _PROBE_TOKENS:].tolist()))
    if least < _LEAST_CHANGE or distinct < _LEAST_DISTINCT:
        raise KVTierError(
            f"this random model proves nothing: a prompt token moves the logits by {least:.1e} only, and 24 decoded "
            f"tokens are {distinct} different ones; take another seed"
        )
