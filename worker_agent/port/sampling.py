"""How a generation's tokens are chosen, and the log probabilities of its tokens.

None means the engine's default. `Sampling` is data: each engine's package translates it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

GuideKind = Literal["json", "regex", "grammar", "json_object", "structural_tag"]
ANSWER_LOGPROBS_MAX = 1 << 18
"""Bound on n x tokens x (1 + logprobs) of an unstreamed answer, and likewise of its prompt; about 15 MB of JSON."""
_PATTERN_MARKS = frozenset("\\.^$|?*+()[]{}")


class Guide(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint on the text. `value` is a JSON schema, a pattern, a grammar, a tag as JSON, or True (`json_object`).

    `field` is the request's key that it is from; empty: the agent made it.
    """

    kind: GuideKind
    value: Any = True
    field: str = ""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """One request's sampling parameters.

    `passed` are options that the engine gets under the client's names (`PASSED` of `option_table.py`), without those
    that are None; its `min_tokens` counts this engine's tokens only. `choices` sequences are generated in parallel.
    `logprobs` is how many of the likeliest tokens are reported at each position, besides the chosen one (0: only that
    one, None: nothing); `prompt_logprobs` likewise for the prompt. With `ignore_eos` the model's end tokens do not stop
    a sequence; the client's own stop tokens still do.
    """

    passed: Mapping[str, Any] = {}
    ignore_eos: bool = False
    choices: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guide: Guide | None = None


UNLIKELY = -9999.0
"""The lowest log probability on a wire: JSON has no -inf. Source: OpenAI API reference (chat completion object), and
NVIDIA/TensorRT-LLM, `tensorrt_llm/serve/postprocess_handlers.py`, `create_logprobs`."""


def bounded_logprob(value: float) -> float:
    """Return `value`, at least `UNLIKELY`; `UNLIKELY` for NaN."""
    return max(UNLIKELY, value)  # in this order: NaN is not above the bound, so the bound is returned


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token at one position, the logarithm of its probability, and its rank among all tokens, from 1."""

    token_id: int
    logprob: float
    rank: int | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """The log probabilities at one position: of the chosen token, and of the likeliest ones, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


def choice_pattern(choices: Sequence[str]) -> str:
    """Return the pattern that matches each of the choices, and nothing else."""
    escaped = ("".join(f"\\{each}" if each in _PATTERN_MARKS else each for each in choice) for choice in choices)
    return f"({'|'.join(escaped)})"
