"""The requests of a rank, waiting and running, and the scheduling rules that differ between engines.

plans_ahead     the batch of an iteration is fixed when the iteration before it begins, so that the host plans while
                the GPU computes; a request that comes meanwhile waits for the end of both. Otherwise: it is fixed
                when the iteration itself begins.
shares_at_once  a prompt's blocks can be reused as soon as their computation is scheduled, even by the next request
                of the same batch. Otherwise: when the prompt's whole context is computed.
prefills_first  an iteration computes prompts alone while there are any, up to the token budget; nothing decodes
                meanwhile. Otherwise: it decodes first, and prompts have the rest of the budget.
admits          a request begins when there are blocks for
                answer    its prompt and its longest answer: they are reserved, so no request is preempted
                prompt    its prompt. When a decoding request needs a block and none is left, the request admitted last
                          is preempted: it frees its blocks, goes to the front of the queue, and later computes prompt
                          and answer anew, except what is still cached
                estimate  its prompt, its longest answer, and what running answers will probably still need
                          (`AnswerEstimate`). When a decoding request needs a block and none is left, the request with
                          the shortest answer so far (of several, the longest prompt) goes to the end of the queue
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from worker_agent.engines.simulated.blocks import BlockTable
from worker_agent.engines.simulated.identity import EngineNamespace
from worker_agent.engines.simulated.timing import IterationWork
from worker_agent.engines.simulated.tokens import TokenSource
from worker_agent.port.types import EngineRequest, FinishReason, computed_tokens_max


class WaitingRequest:
    """A request that is not admitted yet, or that was `preempted`."""

    __slots__ = ("arrived_s", "namespace", "preempted", "request", "source")

    def __init__(
        self, request: EngineRequest, arrived_s: float, source: TokenSource, preempted: "RunningRequest | None" = None
    ) -> None:
        self.request = request
        self.namespace = EngineNamespace.of(request.lora_name, request.cache_salt)
        self.arrived_s = arrived_s
        self.source = source
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
        "arrived_s", "cached_tokens", "computed_tokens", "context_tokens", "prefix_state", "request", "reused_tokens",
        "source", "table", "tokens", "unreported",
    )  # fmt: skip

    def __init__(self, waiting: WaitingRequest, table: BlockTable, cached_tokens: int, prefix_state: int) -> None:
        self.request = waiting.request
        self.arrived_s = waiting.arrived_s
        self.source = waiting.source
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


class Scheduling(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of one engine."""

    plans_ahead: bool = False
    shares_at_once: bool = False
    prefills_first: bool = False
    admits: Literal["answer", "prompt", "estimate"] = "answer"


class AnswerEstimate:
    """The share of the tokens that running answers may still have for which admission leaves blocks.

    It falls with each iteration that decodes, is computed anew after a retraction from the requests that still run, and
    is `FIRST` again when the engine is idle.
    """

    FIRST, LEAST, FALL = 0.7, 0.7 * 0.14, 0.7 * 0.86 / 600
    """At the beginning; never less; less for each iteration that decodes."""
    AFTER_RETRACTION_TOKENS = 20
    """Tokens of each running answer for which a retraction leaves blocks."""

    def __init__(self) -> None:
        self._from, self._decoded = self.FIRST, 0

    @property
    def share(self) -> float:
        """Return the share (0..1) now."""
        return max(self.LEAST, self._from - self._decoded * self.FALL)

    def begin(self) -> None:
        """Begin anew: the engine is idle."""
        self._from, self._decoded = self.FIRST, 0

    def decoded(self, iterations: int) -> None:
        """Count iterations that decoded."""
        self._decoded += iterations

    def retracted(self, left: Iterable[RunningRequest]) -> None:
        """Compute the share anew: requests were retracted, and those `left` decode on."""
        decoded, longest = 0, 1
        for each in left:
            decoded += each.answer_tokens + self.AFTER_RETRACTION_TOKENS
            longest += computed_tokens_max(each.request) + 1 - len(each.request.prompt)
        self._from, self._decoded = min(1.0, decoded / longest), 0


TRTLLM = Scheduling()
"""TensorRT-LLM without its overlap scheduler: GUARANTEED_NO_EVICT."""
VLLM = Scheduling(plans_ahead=True, shares_at_once=True, admits="prompt")
"""Source: vLLM's release notes of 0.14 (asynchronous scheduling by default), its prefix caching design document.

Preemption: vLLM 0.24.0, `vllm/v1/core/sched/scheduler.py`, `schedule` (running requests before waiting ones; the last
of the running is preempted; no admission in a step that preempted) and `_preempt_request` (no computed tokens, front of
the queue); admission: `vllm/config/scheduler.py`, `scheduler_reserve_full_isl` (true) and `watermark` (0).
"""
SGLANG = Scheduling(plans_ahead=True, prefills_first=True, admits="estimate")
"""Source: SGLang 0.5.14, `sglang/srt/managers/`: `scheduler.py` (`event_loop_overlap`, `get_next_batch_to_run`,
`update_running_batch`), `schedule_policy.py` (`PrefillAdder.add_one_req`), `schedule_batch.py` (`retract_decode`),
`scheduler_components/new_token_ratio_tracker.py`; its defaults: first come first served, no mixed chunks, LRU.

Not modelled: its radix tree evicts a whole node (what one request added to a prefix), this simulator block by block.
"""
