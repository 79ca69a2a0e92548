"""A request inside the engine, and the responses that it makes.

    context_and_generation   prompt -> tokens until length, end token, or stop words
    context_only             prompt -> one token, its blocks wait for a generation worker; says where they are
    generation_only          takes another worker's blocks and first tokens, and goes on behind them
    encode                   media -> one handle for each item; no tokens

Source: `executor/result.py` @ a678b91a (what a response has), `llmapi/llm.py`; `docs/SOURCES.md` D4.2.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from .cache import Held, Identity
from .media import MediaItem

Finish = Literal["end_id", "stop_words", "length", "cancelled", "not_finished", "timed_out"]


@dataclass
class Response:
    """What the engine says of one sequence after an iteration; the last of a request is `is_final`."""

    sequence: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] | None = None
    finish: Finish | None = None
    is_final: bool = False
    cached_tokens: int = 0
    iteration: int = 0
    error: str | None = None
    context_state: Any = None
    perf: Any = None
    mm_handles: list[dict[str, Any]] | None = None
    mm_hashes: list[list[int]] | None = None


@dataclass(eq=False)
class Sequence:
    """One of a request's `best_of` sequences."""

    number: int
    generated: list[int] = field(default_factory=list)
    sent: int = 0
    logprobs: list[Any] = field(default_factory=list)
    finish: Finish | None = None
    held: Held = field(default_factory=Held)
    """What it holds of the cache: nothing for an encoder."""


@dataclass(eq=False)
class Request:
    """A request, from submission until its last response. `sink` takes its responses, on the engine's thread."""

    request_id: int
    prompt: list[int]
    params: Any
    sink: Any
    streaming: bool
    max_tokens: int
    identity: Identity
    dp_rank: int | None = None
    kind: str = "context_and_generation"
    disaggregated: Any = None
    media: list[MediaItem] = field(default_factory=list)
    failure: str | None = None
    rank: int = 0
    cached_tokens: int = 0
    first_iteration: int = 0
    is_cancelled: bool = False
    is_prefilled: bool = False
    sequences: list[Sequence] = field(default_factory=list)

    def tokens(self, sequence: Sequence) -> list[int]:
        """Return the prompt and what was generated after it."""
        return self.prompt + sequence.generated
