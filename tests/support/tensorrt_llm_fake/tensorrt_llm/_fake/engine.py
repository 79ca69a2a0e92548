"""The iteration loop's body, without a thread: admit, prefill, generate, tell. One call of `iterate` is one iteration.

| step | rule |
|---|---|
| admit | while there is room for whole requests (GUARANTEED_NO_EVICT) and in the batch; in turn |
| rank | the one that is asked for; the least busy where none is |
| prefill | in the iteration of admission, whole; it makes the first token |
| generate | one token for each sequence |
| tell | responses to sinks, events visible, a row of statistics |

A context-only request stays active, and keeps its blocks, until a generation worker has them.
Source: `docs/SOURCES.md` E1.2 to E1.7, docs `features/kvcache.md`; the formula of tokens is `_fake/model.py`.
"""

import hashlib
import math
from collections import deque
from collections.abc import Callable
from typing import Any

from . import model, statistics
from .cache import BlockCache
from .control import control
from .events import RankEvents
from .hashing import number_of
from .media import handle_of
from .perf import measured
from .requests import Finish, Request, Response, Sequence
from .statistics import Iteration, RankLoad
from .transfers import Transfers, take

Json = dict[str, Any]
STATE = b"fake-kv-state:"


class Rank:
    """One attention-DP rank: its cache and its events."""

    def __init__(self, args: Any, dp_rank: int | None) -> None:
        config = args.kv_cache_config
        v2 = config.use_kv_cache_manager_v2 is True
        algorithm = (
            "v1_block_key" if config.kv_cache_event_hash_algo == "auto" or not v2 else config.kv_cache_event_hash_algo
        )
        longest = control.model.seq_len_of(args.max_seq_len)
        self.events = RankEvents(longest, config.event_buffer_max_size, dp_rank, algorithm if v2 else None)
        blocks = control.model.gpu_blocks
        if config.max_tokens is not None:
            blocks = min(blocks, -(-config.max_tokens // config.tokens_per_block))
        self.cache = BlockCache(config.tokens_per_block, blocks, self.events)
        self.cache.reuse, self.cache.algorithm = config.enable_block_reuse, algorithm
        self.events.flush()
        self.active: list[Request] = []


class Engine:
    """What an executor computes with. Its methods are called under one lock."""

    def __init__(self, args: Any, wake: Callable[[], None], *, encoder_only: bool) -> None:
        self.args = args
        self.encoder_only = encoder_only
        self.transfers = Transfers(wake)
        size = args.kv_cache_config.tokens_per_block
        if size < 2 or size & (size - 1):
            raise RuntimeError(f"tokens_per_block must be a power of two greater than 1, got {size}")
        self.attention_dp = bool(args.enable_attention_dp) and args.tensor_parallel_size > 1
        count = args.tensor_parallel_size if self.attention_dp else 1
        self.ranks = [Rank(args, rank if self.attention_dp else None) for rank in range(count)]
        self.waiting: list[Request] = []
        self.statistics: deque[Json] = deque(maxlen=None if args.max_stats_len == -1 else max(1, args.max_stats_len))
        self.iterations = self._dropped = 0

    @property
    def has_work(self) -> bool:
        """Return whether an iteration may find something to do."""
        active = [each for rank in self.ranks for each in list(rank.active)]
        return bool(self.waiting or self.transfers.taken) or any(not _waits(each) for each in active)

    def capacity(self) -> Json:
        """Return the size of a rank's GPU pool."""
        cache = self.ranks[0].cache
        return {
            "maxNumBlocks": cache.capacity,
            "tokensPerBlock": cache.block_size,
            "maxNumTokens": cache.capacity * cache.block_size,
        }

    def drain_events(self) -> list[Json]:
        """Return all visible events: in order for each rank, ranks one after another."""
        drained: list[Json] = []
        for rank in self.ranks:
            drained += rank.events.visible
            rank.events.visible.clear()
        return drained

    def iterate(self) -> bool:
        """Do one iteration; return False where nothing could be done: all that waits, waits for room."""
        completed = len(self.transfers.taken)
        for _ in range(completed):
            self._end(*self.transfers.taken.popleft())
        waiting = len(self.waiting)
        admitted = self._admit()
        running = [each for rank in self.ranks for each in rank.active if not _waits(each)]
        if not completed and not running and len(self.waiting) == waiting:
            return False
        self.iterations += 1
        loads = [RankLoad() for _ in self.ranks]
        for rank, load in zip(self.ranks, loads, strict=True):
            for request in list(rank.active):
                if _waits(request):
                    continue
                self._step(rank, request, load)
                if request not in rank.active:
                    completed += 1
            rank.events.flush()
        if self.args.enable_iter_perf_stats:
            self._account(loads, len(admitted), completed)
        return True

    # ----------------------------------------------------------------------------------------- admission
    def _admit(self) -> list[Request]:
        admitted = []
        for request in list(self.waiting):
            if request.is_cancelled or request.failure is not None:
                self.waiting.remove(request)
                finish: Finish = "cancelled"
                request.sink(Response(finish=finish, is_final=True, error=request.failure))
                continue
            rank = self._rank_for(request)
            if rank is None or not self._begin(rank, request):
                break
            self.waiting.remove(request)
            rank.active.append(request)
            admitted.append(request)
        return admitted

    def _rank_for(self, request: Request) -> Rank | None:
        free = [rank for rank in self.ranks if len(rank.active) < (self.args.max_batch_size or 2048)]
        if request.dp_rank is not None:
            wanted = self.ranks[request.dp_rank]
            return wanted if wanted in free else None
        return min(free, key=lambda rank: len(rank.active), default=None)

    def _begin(self, rank: Rank, request: Request) -> bool:
        request.rank = self.ranks.index(rank)
        if self.encoder_only:
            request.sequences = [Sequence(0)]
            return True
        for number in range(request.params.best_of or 1):
            held = rank.cache.begin(request.prompt, len(request.prompt) + request.max_tokens, request.identity)
            if held is None:
                self._release(rank, request)
                request.sequences = []
                return False
            request.sequences.append(Sequence(number, held=held))
            request.cached_tokens = held.cached_tokens
        return True

    # -------------------------------------------------------------------------------------- computation
    def _step(self, rank: Rank, request: Request, load: RankLoad) -> None:
        if request.is_cancelled:
            self._end(rank, request)
            request.sink(Response(finish="cancelled", is_final=True, iteration=self.iterations))
            return
        if self.encoder_only:
            self._encode(rank, request)
            return
        first = not request.is_prefilled
        if first:
            load.context_requests += 1
            load.context_tokens += len(request.prompt) - request.cached_tokens
            load.context_kv_tokens += len(request.prompt)
            self._prefill(rank, request)
        else:
            load.generation_requests += 1
            load.generation_kv_tokens += sum(len(request.tokens(each)) for each in request.sequences)
        for sequence in request.sequences:
            if sequence.finish is None:
                self._generate(rank, request, sequence)
        self._respond(rank, request)

    def _prefill(self, rank: Rank, request: Request) -> None:
        request.is_prefilled, request.first_iteration = True, self.iterations
        for sequence in request.sequences:
            rank.cache.store(sequence.held, request.prompt, request.identity, partial=False)
            if request.kind == "generation_only":
                sequence.generated += request.disaggregated.first_gen_tokens or []
                sequence.logprobs += _first_logprobs(request)
        if request.kind == "generation_only" and request.disaggregated.ctx_request_id is not None:
            port = request.disaggregated.opaque_state[len(state_of(request.prompt, self.args)) :]
            take(port, request.disaggregated.ctx_request_id)

    def _generate(self, rank: Rank, request: Request, sequence: Sequence) -> None:
        sequence.finish = self._finish_of(request, sequence)
        if sequence.finish is not None:
            return
        token = self._next(request, sequence)
        sequence.generated.append(token)
        rank.cache.grow(sequence.held, len(request.tokens(sequence)))
        sequence.finish = self._finish_of(request, sequence)

    def _next(self, request: Request, sequence: Sequence) -> int:
        params = request.params
        token = model.next_token(request.tokens(sequence), sequence.number)
        bias, bad = params.embedding_bias, params.bad_token_ids or []
        if params.logits_processor is None and params.logprobs is None and bias is None and not bad:
            return token
        logits = model.logits_of(token, control.model.vocab_size)
        if bias is not None:
            logits[0, 0] += _checked_bias(bias, logits.shape[-1])
        logits[0, 0, bad] = -math.inf
        processors = params.logits_processor or []
        for each in processors if isinstance(processors, list) else [processors]:
            each(request.request_id, logits, [request.tokens(sequence)], None, None)
        token = model.winner(logits)
        if params.logprobs is not None:
            sequence.logprobs.append(model.top_logprobs(logits, token, params.logprobs))
        return token

    def _finish_of(self, request: Request, sequence: Sequence) -> Finish | None:
        generated, params = sequence.generated, request.params
        if not generated:
            return None
        if generated[-1] == params.end_id and not params.ignore_eos:
            return "end_id"
        if len(generated) > (params.min_tokens or 0) and generated[-1] in (params.stop_token_ids or []):
            return "stop_words"
        if request.kind == "context_only":
            return "not_finished"
        return "length" if len(generated) >= request.max_tokens else None

    def _encode(self, rank: Rank, request: Request) -> None:
        rank.active.remove(request)
        handles = [handle_of(each, each.length) for each in request.media]
        words = [each.words for each in request.media]
        request.sink(
            Response(finish="length", is_final=True, iteration=self.iterations, mm_handles=handles, mm_hashes=words)
        )

    # ------------------------------------------------------------------------------------------ telling
    def _respond(self, rank: Rank, request: Request) -> None:
        is_over = all(each.finish is not None for each in request.sequences)
        state = None
        if is_over and _waits(request):
            state = self._park(rank, request)
        elif is_over:
            self._end(rank, request)
        interval = request.params._stream_interval or 1
        due = [
            each
            for each in request.sequences
            if each.sent < len(each.generated)
            and (is_over or (request.streaming and (each.finish or len(each.generated) - each.sent >= interval)))
        ]
        for sequence in due:
            request.sink(self._response(request, sequence, state, is_final=is_over and sequence is due[-1]))

    def _response(self, request: Request, sequence: Sequence, state: bytes | None, *, is_final: bool) -> Response:
        new, sequence.sent = sequence.generated[sequence.sent :], len(sequence.generated)
        perf = None
        if is_final and request.params.return_perf_metrics:
            size = self.args.kv_cache_config.tokens_per_block
            perf = measured(request, size, self.iterations)
        return Response(
            sequence=sequence.number,
            token_ids=new,
            logprobs=list(sequence.logprobs) if request.params.logprobs is not None else None,
            finish=sequence.finish,
            is_final=is_final,
            cached_tokens=request.cached_tokens,
            iteration=self.iterations,
            context_state=state,
            perf=perf,
        )

    def _park(self, rank: Rank, request: Request) -> bytes:
        name = request.disaggregated.disagg_request_id or request.request_id
        return state_of(request.prompt, self.args) + self.transfers.offer(name, (rank, request))

    def _end(self, rank: Rank, request: Request) -> None:
        rank.active.remove(request)
        for sequence in request.sequences:
            if request.is_prefilled:
                rank.cache.store(sequence.held, request.tokens(sequence), request.identity, partial=True)
        self._release(rank, request)

    def _release(self, rank: Rank, request: Request) -> None:
        for sequence in request.sequences:
            rank.cache.end(sequence.held)

    def _account(self, loads: list[RankLoad], new: int, completed: int) -> None:
        active = sum(len(rank.active) for rank in self.ranks)
        queued = sum(len(each.prompt) for each in self.waiting)
        limit = (self.args.max_batch_size or 2048) * len(self.ranks)
        drafts = getattr(self.args.speculative_config, "max_draft_len", None) or 0
        told = Iteration(
            self.iterations, new, active, len(self.waiting), queued, completed, limit, self._kv_cache(), loads, drafts
        )
        for row in statistics.rows(told, self.iterations, self._dropped, attention_dp=self.attention_dp):
            self._dropped += len(self.statistics) == self.statistics.maxlen
            self.statistics.append(row)

    def _kv_cache(self) -> Json:
        cache = self.ranks[0].cache
        looked_up = cache.reused + cache.missed
        return {
            "maxNumBlocks": cache.capacity,
            "freeNumBlocks": cache.capacity - cache.used,
            "usedNumBlocks": cache.used,
            "tokensPerBlock": cache.block_size,
            "allocTotalBlocks": cache.alloc_total,
            "allocNewBlocks": cache.alloc_new,
            "reusedBlocks": cache.reused,
            "missedBlocks": cache.missed,
            "cacheHitRate": cache.reused / looked_up if looked_up else 0.0,
        }


def _checked_bias(bias: Any, vocab_size: int) -> Any:
    if bias.shape != (vocab_size,):
        raise RuntimeError(f"embedding_bias of shape {bias.shape}, the vocabulary has {vocab_size} tokens")
    return bias.numpy()


def state_of(prompt: list[int], args: Any) -> bytes:
    """Return what a context worker says of a prompt's blocks before its port, their layout first: bytes, no text."""
    return layout_of(args) + hashlib.sha256(str(number_of(str(prompt))).encode()).digest()


def layout_of(args: Any) -> bytes:
    """Return what both workers of a transfer have to agree in; `inquireSupport` of the real one compares it."""
    cache = args.kv_cache_config
    layout = f"{cache.dtype}/{cache.tokens_per_block}/{args.cache_transceiver_config.backend}"
    return STATE + b"\xff\x00" + hashlib.sha256(layout.encode()).digest()


def _waits(request: Request) -> bool:
    return request.kind == "context_only" and bool(request.sequences) and request.sequences[0].finish == "not_finished"


def _first_logprobs(request: Request) -> list[Any]:
    told = request.disaggregated.first_gen_log_probs
    return list(told or [])
