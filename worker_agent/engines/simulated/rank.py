"""One rank of the simulated engine: schedules the requests of each iteration.

    1. every decoding sequence computes one token, oldest first
    2. sequences in their context phase use the rest of the token budget, oldest first, in chunks
    3. waiting requests are admitted in the order of arrival while budget, sequences and blocks last; the first that
       does not fit blocks all others

`scheduling.py` says where engines differ; `sglang` does 1 only if 2 and 3 have nothing to compute. The
iteration that completes a prompt emits the first token. The last token is only emitted, never computed; a stop token is
the last one.

    prefill    one token, which is the last; unless it is a stop token, the request keeps its blocks until its KV is
               fetched, or expires
    decode     a request whose KV was fetched decodes as soon as it is admitted, after the prefill engine's first token
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import msgspec

from kv_protocol.fleet import Role
from worker_agent.engines.simulated.blocks import BlockPool, BlockTable, RankEvents
from worker_agent.engines.simulated.handovers import HeldContexts, first_logprobs, handed_over
from worker_agent.engines.simulated.scheduling import SGLANG, TRTLLM, VLLM, Chunk, Generation, Scheduling, work_of
from worker_agent.engines.simulated.timing import IterationWork
from worker_agent.engines.simulated.tokens import TokenSource
from worker_agent.port.sampling import TokenLogprobs
from worker_agent.port.types import EngineDescription, EngineOutput, EngineRequest, computed_tokens_max, takes_transfer

_SHARE_FIRST, _SHARE_LEAST, _SHARE_FALL = 0.7, 0.7 * 0.14, 0.7 * 0.86 / 600
"""SGLang's share: admission leaves blocks for this part of the tokens that running answers may still have. It is
`_SHARE_FIRST` on an idle engine, falls by `_SHARE_FALL` in each iteration that decodes, and never below `_SHARE_LEAST`.
A retraction (requests are put back) computes it anew from the requests that still decode."""
_AFTER_RETRACTION_TOKENS = 20
"""For how many more tokens of each running answer a retraction leaves blocks."""


class RankStep(NamedTuple):
    """The work of one rank in one iteration, outputs by request id, and its row of statistics."""

    work: IterationWork
    outputs: tuple[tuple[str, EngineOutput], ...]
    did: dict[str, Any]


class Rank:
    """The queue, the running sequences and the block pool of one rank of an engine of a role."""

    def __init__(
        self,
        engine: EngineDescription,
        token_source: TokenSource,
        attention_dp_rank: int | None,
        scheduling: Scheduling,
        *,
        host_blocks: int,
        role: Role,
        contexts: HeldContexts,
    ) -> None:
        assert role == "aggregated" or scheduling == TRTLLM, "a transferred context cannot be computed anew"
        self._attention_dp_rank = attention_dp_rank
        self._scheduling, self._role, self._contexts = scheduling, role, contexts
        self._began_s = self._planned_s = 0.0
        self._engine = engine
        self._token_source = token_source
        events = RankEvents(engine.max_seq_len, attention_dp_rank)
        self.pool = BlockPool(engine.total_kv_blocks, engine.block_size, events, host_blocks=host_blocks)
        self._moved_blocks = 0
        self._waiting: OrderedDict[str, Generation] = OrderedDict()
        self._waiting_tokens = 0
        self._context: dict[str, Generation] = {}
        self._decoding: dict[str, Generation] = {}
        self._share = _SHARE_FIRST
        self._is_blocked = False

    @property
    def request_count(self) -> int:
        """How many requests wait or run."""
        return len(self._waiting) + self._running_count

    @property
    def is_idle(self) -> bool:
        """Whether an iteration would do nothing until a call changes the state: no request runs or can be admitted."""
        if self._context or self._decoding:
            return False
        return not self._waiting or self._is_blocked

    @property
    def _running_count(self) -> int:
        return len(self._context) + len(self._decoding)

    def submit(self, request: EngineRequest, now_s: float, choice: int = 0) -> None:
        """Queue a request; the caller has checked that the rank can serve it, and that its id is not in use."""
        if not self.request_count:
            self._share = _SHARE_FIRST
        self._waiting[request.request_id] = Generation(request, now_s, self._token_source, choice)
        self._waiting_tokens += len(request.prompt)
        self._is_blocked = False

    def cancel(self, request_id: str) -> None:
        """Forget a waiting or running request. Its computed tokens stay cached."""
        self._is_blocked = False
        if waiting := self._waiting.pop(request_id, None):
            self._waiting_tokens -= len(waiting.tokens)
        elif running := self._context.pop(request_id, None) or self._decoding.pop(request_id, None):
            self._release(running)

    def give_back(self, table: BlockTable, computed: Sequence[int]) -> None:
        """Free blocks; the tokens that were computed in them stay cached, and waiting requests may get blocks."""
        self._is_blocked = False
        self.pool.release(table, computed)

    def step(self, now_s: float) -> RankStep:
        """Compute one iteration that begins at `now_s`; afterwards the state is the one at its end."""
        planned_before = self._scheduling != TRTLLM and (self._context or self._decoding)
        self._planned_s = self._began_s if planned_before else now_s
        self._began_s = now_s
        first = [self._output(each, handed_over(each), first_logprobs(each)) for each in self._resume()]
        budget = self._engine.max_num_batched_tokens
        chunks = self._chunks(budget) if self._scheduling == SGLANG else []
        decoding = [] if chunks else self._decode_batch(budget)
        if self._scheduling != SGLANG:
            chunks = self._chunks(budget - len(decoding))
        work = work_of(decoding, chunks)
        outputs = (
            *first,
            *map(self._decode, decoding),
            *filter(None, map(self._compute, chunks)),
        )
        moved_blocks, self._moved_blocks = self.pool.moved_blocks - self._moved_blocks, self.pool.moved_blocks
        work = msgspec.structs.replace(work, host_tokens=moved_blocks * self._engine.block_size)
        return RankStep(work, outputs, self._did(work, chunks))

    def _decode_batch(self, budget: int) -> list[Generation]:
        """Put requests back until the decoding ones have the blocks they need; return at most `budget` decoding ones.

        A request that was put back is not admitted in this iteration: it needs more blocks than it left free.
        """
        was_retracted = False
        for running in tuple(self._decoding.values()) if self._scheduling != TRTLLM else ():
            while running.request.request_id in self._decoding and not self.pool.reserve(
                running.table, running.computed_tokens + 1
            ):
                was_retracted = True
                self._put_back()
        if was_retracted:
            kept = sum(each.answer_tokens + _AFTER_RETRACTION_TOKENS for each in self._decoding.values())
            longest = 1 + sum(each.request.max_tokens for each in self._decoding.values())
            self._share = max(_SHARE_LEAST, min(1.0, kept / longest))
        elif self._decoding:
            self._share = max(_SHARE_LEAST, self._share - _SHARE_FALL)
        return list(islice(self._decoding.values(), budget))

    def _put_back(self) -> None:
        """Free the blocks of one request, and let it wait before all others; with SGLang's rules, after them."""
        if self._scheduling == SGLANG:
            running = min(self._decoding.values(), key=lambda each: (each.answer_tokens, -len(each.request.prompt)))
            del self._decoding[running.request.request_id]
        else:
            running = (self._context or self._decoding).popitem()[1]
        self._release(running)
        request_id = running.request.request_id
        self._waiting[request_id] = running
        self._waiting.move_to_end(request_id, last=self._scheduling == SGLANG)
        self._waiting_tokens += len(running.tokens)

    def _chunks(self, budget: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        candidates = chain(tuple(self._context.values()), iter(self._admit, None))
        while budget and (running := next(candidates, None)):
            chunk = Chunk(
                running, running.computed_tokens, min(budget, running.context_tokens - running.computed_tokens)
            )
            chunks.append(chunk)
            budget -= chunk.new_tokens
            if self._scheduling == VLLM:
                self.pool.store_context(running.table, running.tokens[: chunk.past_tokens + chunk.new_tokens])
        return chunks

    def _resume(self) -> list[Generation]:
        """Let requests whose KV has come decode, in the order of arrival, up to one that must compute its prompt."""
        resumed = []
        while self._next_has_kv and (running := self._admit_next()) is not None:
            running.computed_tokens = len(running.request.prompt)
            self.pool.store_context(running.table, running.request.prompt)
            running.add(handed_over(running))
            self._decoding[running.request.request_id] = running
            resumed.append(running)
        return resumed

    @property
    def _next_has_kv(self) -> bool:
        return bool(self._waiting) and takes_transfer(next(iter(self._waiting.values())).request, self._role)

    def _admit(self) -> Generation | None:
        """Admit and return the next request; None if it has no prompt to compute, or does not fit."""
        if self._next_has_kv or (running := self._admit_next()) is None:
            return None
        self._context[running.request.request_id] = running
        return running

    def _admit_next(self) -> Generation | None:
        if not self._waiting or self._running_count >= self._engine.max_num_seqs:
            self._is_blocked = True
            return None
        waiting = next(iter(self._waiting.values()))
        if waiting.arrived_s > self._planned_s:
            return None
        tokens_max = computed_tokens_max(waiting.request) if self._scheduling == TRTLLM else len(waiting.tokens)
        spare_blocks = self._answers_blocks(waiting) if self._scheduling == SGLANG else 0
        table = self.pool.admit(waiting.tokens, tokens_max, waiting.namespace, spare_blocks=spare_blocks)
        if table is None:
            self._is_blocked = True
            return None
        del self._waiting[waiting.request.request_id]
        self._waiting_tokens -= len(waiting.tokens)
        waiting.admit(table, table.reused_blocks * self._engine.block_size)
        return waiting

    def _answers_blocks(self, waiting: Generation) -> int:
        """Return the blocks for a request's answer and the estimated rest of the running ones; 0 if it would be alone.

        They include one more block for the request, and for each whose prompt is not computed yet.
        """
        if not self._running_count:
            return 0
        whole = [waiting, *self._context.values()]
        tokens = sum(each.tokens_left + self._engine.block_size for each in whole) + self._share * sum(
            each.tokens_left for each in self._decoding.values()
        )
        return math.ceil(tokens / self._engine.block_size)

    def _decode(self, running: Generation) -> tuple[str, EngineOutput]:
        running.computed_tokens += 1
        self.pool.extend(running.table, running.computed_tokens)
        return self._emit(running)

    def _compute(self, chunk: Chunk) -> tuple[str, EngineOutput] | None:
        running = chunk.running
        running.computed_tokens += chunk.new_tokens
        if running.computed_tokens < running.context_tokens:
            return None
        self.pool.store_context(running.table, running.tokens)
        request_id = running.request.request_id
        self._decoding[request_id] = self._context.pop(request_id)
        return self._emit(running)

    def _emit(self, running: Generation) -> tuple[str, EngineOutput]:
        state, top = running.prefix_state, running.request.sampling.logprobs
        tokens = (running.source.next_token(state),)
        running.add(tokens)
        return self._output(running, tokens, () if top is None else (running.source.logprobs(state, top),))

    def _output(
        self, running: Generation, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs | None, ...]
    ) -> tuple[str, EngineOutput]:
        request_id, finish_reason, handoff = running.request.request_id, running.ending, None
        if finish_reason is not None:
            del self._decoding[request_id]
            if self._role == "prefill" and finish_reason == "length":
                handoff = self._contexts.hold(running, logprobs, self._began_s, self._attention_dp_rank)
            else:
                self._release(running)
        return request_id, EngineOutput(
            token_ids=tokens,
            cached_tokens=running.cached_tokens or 0,
            finish_reason=finish_reason,
            choice=running.choice,
            logprobs=logprobs,
            handoff=handoff,
        )

    def _release(self, running: Generation) -> None:
        self.give_back(running.table, running.tokens[: running.computed_tokens])

    def _did(self, work: IterationWork, chunks: list[Chunk]) -> dict[str, Any]:
        """Return the row of statistics in TensorRT-LLM's JSON shape, as far as it is read.

        Counts of requests and blocks are those at the end of the iteration, so the last row before idleness shows no
        load. With several ranks every row has its own rank's block counts and queue; TensorRT-LLM has the base row's
        in all rows. Source: `docs/SOURCES.md` E1.7.
        """
        rank = {} if self._attention_dp_rank is None else {"attentionDpRank": self._attention_dp_rank}
        return {
            "numActiveRequests": self._running_count + self._contexts.count_at(self._attention_dp_rank),
            "numQueuedRequests": len(self._waiting),
            "kvCacheStats": {
                "maxNumBlocks": self._engine.total_kv_blocks,
                "usedNumBlocks": self.pool.used_blocks,
                "tokensPerBlock": self._engine.block_size,
            },
            "inflightBatchingStats": {
                "numContextRequests": len(chunks),
                "numGenRequests": work.decode_sequences,
                "numPausedRequests": 0,
                "numCtxTokens": work.context_tokens,
                "numCtxKvTokens": sum(chunk.past_tokens + chunk.new_tokens for chunk in chunks),
                "numGenKvTokens": work.kv_tokens,
                "numQueuedContextRequests": len(self._waiting),
                "numQueuedCtxTokens": self._waiting_tokens,
                "numQueuedGenRequests": 0,
                "numQueuedGenKvTokens": 0,
                "numPausedKvTokens": 0,
            },
            **rank,
        }
