"""The requests of a rank, waiting and running, and what of them an iteration computes."""

from collections.abc import Sequence

import msgspec

from worker_agent.engines.simulated.blocks import BlockTable
from worker_agent.engines.simulated.identity import EngineNamespace
from worker_agent.engines.simulated.timing import IterationWork
from worker_agent.engines.simulated.tokens import TokenSource
from worker_agent.port.types import EngineRequest, FinishReason, computed_tokens_max


class WaitingRequest:
    """A request that is not admitted yet, or that was `preempted`."""

    __slots__ = ("arrived_s", "is_cancelled", "namespace", "preempted", "request", "source")

    def __init__(
        self, request: EngineRequest, arrived_s: float, source: TokenSource, preempted: "RunningRequest | None" = None
    ) -> None:
        self.request = request
        self.namespace = EngineNamespace.of(request.lora_name, request.cache_salt)
        self.arrived_s = arrived_s
        self.source = source
        self.is_cancelled = False
        self.preempted = preempted

    @property
    def tokens(self) -> Sequence[int]:
        """What is to be computed before the next token: the prompt, and the answer so far."""
        return self.preempted.tokens if self.preempted else self.request.prompt


class RunningRequest:
    """An admitted request: its tokens so far, how many of them are computed, and the last ones, not reported yet.

    `context_tokens` are computed in its context phase, beginning after `reused_tokens`; both are of the last admission,
    `cached_tokens` of the first.
    """

    __slots__ = (
        "arrived_s", "cached_tokens", "computed_tokens", "context_tokens", "is_cancelled", "prefix_state", "request",
        "reused_tokens", "source", "table", "tokens", "unreported",
    )  # fmt: skip

    def __init__(self, waiting: WaitingRequest, table: BlockTable, cached_tokens: int, prefix_state: int) -> None:
        self.request = waiting.request
        self.arrived_s = waiting.arrived_s
        self.source = waiting.source
        self.is_cancelled = waiting.is_cancelled
        self.unreported: tuple[int, ...] = ()
        self.tokens = list(waiting.request.prompt)
        self.prefix_state = prefix_state
        self.cached_tokens = cached_tokens
        self.begin_context(table, cached_tokens)

    def begin_context(self, table: BlockTable, reused_tokens: int) -> None:
        """Begin to compute all tokens so far but those reused."""
        self.table = table
        self.computed_tokens = self.reused_tokens = reused_tokens
        self.context_tokens = len(self.tokens)

    @property
    def answer_tokens(self) -> int:
        """How many tokens its answer has so far."""
        return len(self.tokens) - len(self.request.prompt)


class Chunk(msgspec.Struct, frozen=True):
    """Part of a prompt, computed in one iteration after `past_tokens` others."""

    running: RunningRequest
    past_tokens: int
    new_tokens: int

    @property
    def end_tokens(self) -> int:
        """How many tokens of the prompt are computed after it."""
        return self.past_tokens + self.new_tokens

    @property
    def is_first(self) -> bool:
        """Whether the request is admitted in this iteration."""
        return self.past_tokens == self.running.reused_tokens


def work_of(decoding: Sequence[RunningRequest], chunks: Sequence[Chunk]) -> IterationWork:
    """Return what an iteration computes: a token of each decoding sequence, and the chunks."""
    return IterationWork(
        context_tokens=sum(chunk.new_tokens for chunk in chunks),
        attention_pairs=sum(chunk.new_tokens * (chunk.past_tokens + chunk.new_tokens / 2) for chunk in chunks),
        decode_sequences=len(decoding),
        kv_tokens=sum(running.computed_tokens for running in decoding),
    )


def ending(running: RunningRequest) -> FinishReason | None:
    """Return why the last token is the last; None where it is not."""
    if running.tokens[-1] in running.request.stop_token_ids:
        return "stop"
    return "length" if len(running.tokens) > computed_tokens_max(running.request) else None
