"""One rank of the simulated engine: who computes what in an iteration.

    1. every decoding sequence computes one token, oldest first
    2. sequences in their context phase take what is left of the token budget, oldest first, in chunks
    3. waiting requests are admitted in the order of arrival while budget, sequences and blocks last; the first that
       does not fit keeps all others waiting

A request is admitted only when the blocks of all tokens that it may ever compute can be had, so none is evicted or
paused later (GUARANTEED_NO_EVICT). The iteration that completes a prompt emits the first token. The last token is only
emitted, never computed; a stop token is the last one.
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, islice

import msgspec

from worker_agent.core.engine import EngineDescription, EngineOutput, EngineRequest, FinishReason
from worker_agent.core.request_limits import computed_tokens_max
from worker_agent.core.simulator.blocks import BlockTable
from worker_agent.core.simulator.identity import BlockHash, Namespace, trtllm_hash
from worker_agent.core.simulator.layout import GPU_ONLY, CacheLayout, RankCache
from worker_agent.core.simulator.scheduling import TRTLLM, Scheduling
from worker_agent.core.simulator.statistics import RankIteration
from worker_agent.core.simulator.timing import IterationWork
from worker_agent.core.simulator.tokens import TokenSource


class _Waiting:
    __slots__ = ("arrived_s", "namespace", "request")

    def __init__(self, request: EngineRequest, arrived_s: float) -> None:
        self.request = request
        self.namespace = Namespace.of(request.lora_name, request.cache_salt)
        self.arrived_s = arrived_s


class _Running:
    """An admitted request: its tokens so far, and how many of them are computed."""

    __slots__ = ("arrived_s", "cached_tokens", "computed_tokens", "prefix_state", "request", "table", "tokens")

    def __init__(self, waiting: _Waiting, table: BlockTable, cached_tokens: int, prefix_state: int) -> None:
        self.request = waiting.request
        self.arrived_s = waiting.arrived_s
        self.table = table
        self.tokens = list(waiting.request.prompt)
        self.prefix_state = prefix_state
        self.cached_tokens = cached_tokens
        self.computed_tokens = cached_tokens


class _Chunk(msgspec.Struct, frozen=True):
    """Part of a prompt, computed in one iteration after `past_tokens` others."""

    running: _Running
    past_tokens: int
    new_tokens: int

    @property
    def end_tokens(self) -> int:
        """How many tokens of the prompt are computed after it."""
        return self.past_tokens + self.new_tokens

    @property
    def is_first(self) -> bool:
        """Whether the request is admitted in this iteration."""
        return self.past_tokens == self.running.cached_tokens


class RankStep(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank does in one iteration."""

    work: IterationWork
    outputs: tuple[tuple[str, EngineOutput], ...]
    did: RankIteration


class Rank:
    """The queue, the running sequences and the block pool of one rank."""

    def __init__(
        self,
        engine: EngineDescription,
        token_source: TokenSource,
        attention_dp_rank: int | msgspec.UnsetType,
        block_hash: BlockHash = trtllm_hash,
        scheduling: Scheduling = TRTLLM,
        layout: CacheLayout = GPU_ONLY,
    ) -> None:
        self.attention_dp_rank = attention_dp_rank
        self._scheduling = scheduling
        self._began_s = self._planned_s = 0.0
        self._engine = engine
        self._token_source = token_source
        self.cache = RankCache(engine, layout, attention_dp_rank, block_hash)
        self.pool = self.cache.pool
        self._moved_blocks = 0
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        self._waiting_tokens = 0
        self._context: dict[str, _Running] = {}
        self._decoding: dict[str, _Running] = {}

    @property
    def request_count(self) -> int:
        """How many requests wait or run."""
        return len(self._waiting) + len(self._context) + len(self._decoding)

    def submit(self, request: EngineRequest, now_s: float) -> None:
        """Queue a request, which the rank can serve and whose id is not in use."""
        self._waiting[request.request_id] = _Waiting(request, now_s)
        self._waiting_tokens += len(request.prompt)

    def cancel(self, request_id: str) -> None:
        """Forget a request that waits or runs and free its blocks; what it computed stays cached."""
        if waiting := self._waiting.pop(request_id, None):
            self._waiting_tokens -= len(waiting.request.prompt)
        elif running := self._context.pop(request_id, None) or self._decoding.pop(request_id, None):
            self.pool.release(running.table, running.tokens[: running.computed_tokens])

    def step(self, now_s: float) -> RankStep:
        """Compute one iteration that begins at `now_s`; the state afterwards is that at its end."""
        self._plan(now_s)
        budget = self._engine.max_num_batched_tokens
        decoding = list(islice(self._decoding.values(), budget))
        chunks = self._chunks(budget - len(decoding))
        work = _work(decoding, chunks)
        outputs = (*map(self._decode, decoding), *filter(None, map(self._compute, chunks)))
        if moved_blocks := self.pool.moved_blocks - self._moved_blocks:
            self._moved_blocks += moved_blocks
            work = msgspec.structs.replace(work, host_tokens=moved_blocks * self._engine.block_size)
        return RankStep(work=work, outputs=outputs, did=self._did(work, chunks, outputs, now_s))

    def quiet_iterations(self, iterations_max: int) -> int:
        """Return for how many iterations nothing can happen but decoding: nobody begins, ends or takes a block."""
        if self._waiting or self._context or len(self._decoding) > self._engine.max_num_batched_tokens:
            return 0
        return min((self._quiet_iterations(each) for each in self._decoding.values()), default=iterations_max)

    def _quiet_iterations(self, running: _Running) -> int:
        if running.request.stop_token_ids:
            return 0
        until_end = computed_tokens_max(running.request) - len(running.tokens)
        blocks = len(running.table.path) + running.table.own_blocks
        return min(until_end, blocks * self._engine.block_size - running.computed_tokens)

    def quiet_work(self, iterations: int) -> Iterator[IterationWork]:
        """Yield what so many quiet iterations will compute."""
        sequences = len(self._decoding)
        kv_tokens = sum(running.computed_tokens for running in self._decoding.values())
        for iteration in range(iterations):
            yield IterationWork(decode_sequences=sequences, kv_tokens=kv_tokens + iteration * sequences)

    def skip(self, iterations: int, began_s: float) -> None:
        """Compute quiet iterations, the last of which began at `began_s`, and tell nobody."""
        self._began_s = began_s
        for running in self._decoding.values():
            running.computed_tokens += iterations
            for _ in range(iterations):
                self._say(running)

    def _plan(self, now_s: float) -> None:
        """Note when this iteration's batch was fixed: with the one before, where that runs on into this one."""
        planned_before = self._scheduling.plans_ahead and (self._context or self._decoding)
        self._planned_s = self._began_s if planned_before else now_s
        self._began_s = now_s

    def _chunks(self, budget: int) -> list[_Chunk]:
        chunks: list[_Chunk] = []
        candidates = chain(tuple(self._context.values()), iter(self._admit, None))
        while budget and (running := next(candidates, None)):
            new_tokens = min(budget, len(running.request.prompt) - running.computed_tokens)
            chunks.append(_Chunk(running, running.computed_tokens, new_tokens))
            budget -= new_tokens
            if self._scheduling.shares_at_once:
                self.pool.store_context(running.table, running.request.prompt[: chunks[-1].end_tokens])
        return chunks

    def _admit(self) -> _Running | None:
        if not self._waiting or len(self._context) + len(self._decoding) >= self._engine.max_num_seqs:
            return None
        waiting = next(iter(self._waiting.values()))
        if waiting.arrived_s > self._planned_s:
            return None
        request = waiting.request
        table = self.pool.admit(request.prompt, computed_tokens_max(request), waiting.namespace, request.priority)
        if table is None:
            return None
        del self._waiting[request.request_id]
        self._waiting_tokens -= len(request.prompt)
        cached_tokens = table.reused_blocks * self._engine.block_size
        running = _Running(waiting, table, cached_tokens, self._token_source.fold(request.prompt))
        self._context[request.request_id] = running
        return running

    def _decode(self, running: _Running) -> tuple[str, EngineOutput]:
        running.computed_tokens += 1
        self.pool.extend(running.table, running.computed_tokens)
        return self._emit(running)

    def _compute(self, chunk: _Chunk) -> tuple[str, EngineOutput] | None:
        running, prompt = chunk.running, chunk.running.request.prompt
        running.computed_tokens += chunk.new_tokens
        if running.computed_tokens < len(prompt):
            return None
        self.pool.store_context(running.table, prompt)
        request_id = running.request.request_id
        self._decoding[request_id] = self._context.pop(request_id)
        return self._emit(running)

    def _emit(self, running: _Running) -> tuple[str, EngineOutput]:
        request = running.request
        token = self._say(running)
        finish_reason: FinishReason | None = None
        if token in request.stop_token_ids:
            finish_reason = "stop"
        elif len(running.tokens) > computed_tokens_max(request):
            finish_reason = "length"
        if finish_reason:
            del self._decoding[request.request_id]
            self.pool.release(running.table, running.tokens[: running.computed_tokens])
        output = EngineOutput(token_ids=(token,), cached_tokens=running.cached_tokens, finish_reason=finish_reason)
        return request.request_id, output

    def _say(self, running: _Running) -> int:
        token = self._token_source.next_token(running.prefix_state)
        running.prefix_state = self._token_source.fold((token,), running.prefix_state)
        running.tokens.append(token)
        return token

    def _did(
        self, work: IterationWork, chunks: list[_Chunk], outputs: tuple[tuple[str, EngineOutput], ...], now_s: float
    ) -> RankIteration:
        new = [chunk.running for chunk in chunks if chunk.is_first]
        return RankIteration(
            context_requests=len(chunks),
            context_tokens=work.context_tokens,
            context_kv_tokens=sum(chunk.past_tokens + chunk.new_tokens for chunk in chunks),
            decode_requests=work.decode_sequences,
            decode_kv_tokens=work.kv_tokens,
            new_requests=len(new),
            queue_latency_s=sum(now_s - running.arrived_s for running in new),
            completed_requests=sum(output.finish_reason is not None for _, output in outputs),
            active_requests=len(self._context) + len(self._decoding),
            waiting_requests=len(self._waiting),
            waiting_tokens=self._waiting_tokens,
            pool=self.pool.statistics(),
        )


def _work(decoding: list[_Running], chunks: list[_Chunk]) -> IterationWork:
    return IterationWork(
        context_tokens=sum(chunk.new_tokens for chunk in chunks),
        attention_pairs=sum(chunk.new_tokens * (chunk.past_tokens + chunk.new_tokens / 2) for chunk in chunks),
        decode_sequences=len(decoding),
        kv_tokens=sum(running.computed_tokens for running in decoding),
    )
