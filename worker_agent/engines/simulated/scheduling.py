"""The requests of a rank, and the scheduling rules that differ between engines.

    trtllm    The batch of an iteration is fixed when the iteration begins. It decodes first; prompts have the rest of
              the token budget. A prompt's blocks can be reused when its whole context is computed. A request is
              admitted when there are blocks for its prompt and its longest answer: they are reserved, so no request is
              preempted.
    vllm      The batch is fixed when the iteration before it begins, so that the host plans while the GPU computes: a
              request that comes meanwhile waits until both iterations end. A prompt's blocks can be reused once their
              computation is scheduled, even by the next request of the same batch. A request is admitted when there are
              blocks for its prompt. When a decoding request needs a block and none is left, the request admitted last
              is preempted: it frees its blocks, goes to the front of the queue, and later computes prompt and answer
              anew, except what is still cached.
    sglang    The batch is fixed as vllm's is. While there are prompts, an iteration computes only these, up to the
              token budget. A request is admitted when there are blocks for its prompt, its longest answer, and what
              running answers will probably still need. When a decoding request needs a block and none is left, the
              request with the shortest answer so far (of several, the longest prompt) goes to the end of the queue.

Source of trtllm: TensorRT-LLM without its overlap scheduler, GUARANTEED_NO_EVICT.

Source of vllm: release notes of 0.14 (asynchronous scheduling by default), its prefix caching design document. vLLM
0.24.0, `vllm/v1/core/sched/scheduler.py`, `schedule` (running requests before waiting ones; the last of the running is
preempted; no admission in a step that preempted) and `_preempt_request` (no computed tokens, front of the queue);
`vllm/config/scheduler.py`, `scheduler_reserve_full_isl` (true) and `watermark` (0).

Source of sglang: SGLang 0.5.14, `sglang/srt/managers/`: `scheduler.py` (`event_loop_overlap`, `get_next_batch_to_run`,
`update_running_batch`), `schedule_policy.py` (`PrefillAdder.add_one_req`), `schedule_batch.py` (`retract_decode`),
`scheduler_components/new_token_ratio_tracker.py`; its defaults: first come first served, no mixed chunks, LRU. Not
modelled: its radix tree evicts a whole node (what one request added to a prefix), this simulator block by block.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from kv_protocol.hashing import Namespace
from worker_agent.engines.simulated.blocks import BlockTable
from worker_agent.engines.simulated.timing import IterationWork
from worker_agent.engines.simulated.tokens import TokenSource
from worker_agent.port.types import EngineRequest, FinishReason

Scheduling = Literal["trtllm", "vllm", "sglang"]
TRTLLM: Scheduling = "trtllm"
VLLM: Scheduling = "vllm"
SGLANG: Scheduling = "sglang"


class Generation:
    """One request at a rank, waiting or running: its tokens so far, and how many of them are computed.

    It has no `table` while it waits. Its context phase ends when all tokens that it had when admitted are computed.
    `cached_tokens` are those that its first admission reused.
    """

    __slots__ = (
        "arrived_s", "cached_tokens", "choice", "computed_tokens", "context_tokens", "namespace", "prefix_state",
        "request", "source", "table", "tokens",
    )  # fmt: skip
    table: BlockTable

    def __init__(self, request: EngineRequest, arrived_s: float, source: TokenSource, choice: int = 0) -> None:
        self.request, self.arrived_s, self.source, self.choice = request, arrived_s, source.of_choice(choice), choice
        self.namespace = namespace_of(request)
        self.tokens = list(request.prompt)
        self.prefix_state = self.source.fold(request.prompt)
        self.cached_tokens: int | None = None
        self.computed_tokens = self.context_tokens = 0

    def admit(self, table: BlockTable, reused_tokens: int) -> None:
        """Begin to compute all tokens so far but those reused."""
        self.table = table
        self.computed_tokens = reused_tokens
        self.context_tokens = len(self.tokens)
        if self.cached_tokens is None:
            self.cached_tokens = reused_tokens

    def add(self, tokens: tuple[int, ...]) -> None:
        """Append these tokens to the answer."""
        self.tokens += tokens
        self.prefix_state = self.source.fold(tokens, self.prefix_state)

    @property
    def answer_tokens(self) -> int:
        """How many tokens its answer has so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def tokens_left(self) -> int:
        """How many more tokens its answer may have."""
        return self.request.max_tokens - self.answer_tokens

    @property
    def ending(self) -> FinishReason | None:
        """Why the answer ends with its last token; None: it continues."""
        if self.tokens[-1] in self.request.stop_token_ids:
            return "stop"
        return None if self.tokens_left > 0 else "length"


def namespace_of(request: EngineRequest) -> Namespace:
    """Return the texts that distinguish equal tokens; an empty name or salt is an absent one."""
    return Namespace(request.lora_name or None, request.cache_salt or None)


class Chunk(NamedTuple):
    """Part of a prompt, computed in one iteration after `past_tokens` others."""

    running: Generation
    past_tokens: int
    new_tokens: int


def work_of(decoding: Sequence[Generation], chunks: Sequence[Chunk]) -> IterationWork:
    """Return what an iteration computes: a token of each decoding sequence, and the chunks."""
    return IterationWork(
        context_tokens=sum(chunk.new_tokens for chunk in chunks),
        attention_pairs=sum(chunk.new_tokens * (chunk.past_tokens + chunk.new_tokens / 2) for chunk in chunks),
        decode_sequences=len(decoding),
        kv_tokens=sum(running.computed_tokens for running in decoding),
    )
