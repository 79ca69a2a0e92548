"""How a request's tokens are chosen, and the interface of logits processors.

Both are keyword-only dataclasses with slots: an unknown keyword is a TypeError, an unknown attribute an AttributeError;
values are not checked but for the ranges of `_validate`, which are ValueErrors.
Source: `tensorrt_llm/sampling_params.py` @ a98a9061; `AdditionalModelOutput` left out.
"""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import Any

from pydantic import BaseModel


@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    """At most one of the fields may be set."""

    json: str | BaseModel | dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None

    def _validate(self) -> None:
        guides = sum(bool(getattr(self, each.name)) for each in fields(self))
        if guides > 1:
            raise ValueError(f"Only one guide can be used for a request, but got {guides}.")


class LogitsProcessor(ABC):
    """A callback that changes a request's logits in place, once for each of its tokens."""

    @abstractmethod
    def __call__(
        self, req_id: int, logits: Any, token_ids: list[list[int]], stream_ptr: int | None, client_id: int | None
    ) -> None:
        """Change `logits` in place; `token_ids` has one list of prompt and generated tokens for each beam."""


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """The parameters of one request. `generate_async` changes the instance that it is given (`llmapi/llm.py`)."""

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    bad_token_ids: list[int] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: Any = None
    logits_processor: Any = None
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    min_p: float | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_perf_metrics: bool = False
    guided_decoding: GuidedDecodingParams | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    _stream_interval: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.pad_id is None:
            self.pad_id = self.end_id
        self.best_of = self.best_of or self.n
        self._validate()

    def _validate(self) -> None:
        self._check_ranges()
        if (self.best_of or 1) < self.n:
            raise ValueError(f"best_of ({self.best_of}) cannot be less than n ({self.n})")
        if (self.best_of or 1) > 1 and self._greedy_decoding and not os.environ.get("TLLM_ALLOW_N_GREEDY_DECODING"):
            raise ValueError(
                f"Greedy decoding in the LLM API does not allow multiple returns. Please set to best_of=1, "
                f"got best_of={self.best_of}."
            )
        if self.guided_decoding is not None:
            self.guided_decoding._validate()
        self.logprobs = self.logprobs and int(self.logprobs)
        self.prompt_logprobs = self.prompt_logprobs and int(self.prompt_logprobs)

    def _check_ranges(self) -> None:
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"require top_k >= 0, got top_k={self.top_k}")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"require temperature >= 0, got temperature={self.temperature}")

    @property
    def _greedy_decoding(self) -> bool:
        unset = self.temperature is None and self.top_p is None and self.top_k is None
        return not self.use_beam_search and (unset or self.top_k == 1 or self.top_p == 0 or self.temperature == 0)
