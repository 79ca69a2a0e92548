"""How the tokens of a generation are chosen, and what is reported of each.

What is None is the engine's own choice. `Sampling` is data: what an engine makes of it stands beside that engine.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

GuideKind = Literal["json", "regex", "grammar", "json_object", "structural_tag"]
ANSWER_LOGPROBS_MAX = 1 << 18
"""Of an unstreamed answer: n x max_tokens x (1 + top_logprobs), of the prompt likewise; about 15 MB of JSON."""
_PATTERN_MARKS = frozenset("\\.^$|?*+()[]{}")


class Guide(msgspec.Struct, frozen=True, kw_only=True):
    """What the text has to obey: a JSON schema, a pattern, a grammar or a tag; `json_object` needs no value."""

    kind: GuideKind
    value: Any = None


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """One request's wishes.

    `choices` sequences are generated side by side. `logprobs` says how many of the likeliest tokens are told at each
    place, besides the chosen one: 0 that one alone, None nothing; `prompt_logprobs` likewise of the prompt. With
    `ignore_eos` the model's end tokens are tokens like others; the client's own stop tokens still stop.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    choices: int = 1
    best_of: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guide: Guide | None = None


UNLIKELY = -9999.0
"""The lowest log probability on a wire: JSON has no -inf. Source: OpenAI API reference (chat completion object), and
NVIDIA/TensorRT-LLM, `tensorrt_llm/serve/postprocess_handlers.py`, `create_logprobs`."""


def bounded_logprob(value: float) -> float:
    """Return `value`, `UNLIKELY` at least, and in place of what is not a number."""
    return max(UNLIKELY, value)  # in this order: not a number is not above the bound


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token at one place, the logarithm of its probability, and its rank among all tokens, from 1."""

    token_id: int
    logprob: float
    rank: int | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """What is told of one place: the token that stands there, and the likeliest ones, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


def choice_pattern(choices: Sequence[str]) -> str:
    """Return the pattern that matches each of the choices, and nothing else."""
    escaped = ("".join(f"\\{each}" if each in _PATTERN_MARKS else each for each in choice) for choice in choices)
    return f"({'|'.join(escaped)})"
