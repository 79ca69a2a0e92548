"""What comes of a request, and of polling.

    a result      is made in an event loop, awaitable, and iterable with `async`; each step waits for one response of
                  the engine and yields the same object again, whose outputs have grown in place
    its end       `finished`; then iterating stops. A failed request raises RequestError, a dead engine EngineDeadError
    finish_reason is set on the sequence of the request's last response alone: sequences that end before it keep None,
                  and their stop tokens
    stop tokens   are cut from `token_ids` unless asked for; the end token stays

Source: `tensorrt_llm/executor/result.py` @ a678b91a.
"""

# ruff: noqa: TID252  by its own name mypy would look for the real package

import asyncio
import weakref
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from .._fake.control import control
from .._fake.requests import Response
from ..disaggregated_params import DisaggregatedParams
from ..metrics.collector import MetricsCollector, _MetricNames
from .utils import RequestError

FINISH_REASONS = {"end_id": "stop", "stop_words": "stop", "length": "length", "timed_out": "timeout"}


@dataclass(slots=True)
class Logprob:
    """A token's log probability and its rank in the vocabulary, from 1."""

    logprob: float
    rank: int | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One sequence of a request; `_diff` members are what the last response added."""

    index: int
    text: str = ""
    token_ids: list[int] | None = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: Any = field(default_factory=list)
    prompt_logprobs: Any = field(default_factory=list)
    finish_reason: Literal["stop", "length", "timeout", "cancelled"] | str | None = None  # noqa: PYI051
    stop_reason: int | str | None = None
    generation_logits: Any = None
    additional_context_outputs: dict[str, Any] | None = None
    additional_generation_outputs: dict[str, Any] | None = None
    disaggregated_params: DisaggregatedParams | None = None
    request_perf_metrics: Any = None
    _incremental_states: dict[str, Any] | None = field(default=None, init=False, repr=False)
    _postprocess_result: Any = None

    @property
    def length(self) -> int:
        """Return how many tokens there are."""
        return len(self.token_ids or [])


class GenerationResult:
    """A request's result; made by the executor."""

    def __init__(self, request_id: int, prompt: list[int], params: Any, disaggregated: Any, executor: Any) -> None:
        self.id = request_id
        self.sampling_params = params
        self.disaggregated_params: DisaggregatedParams | None = disaggregated
        self.decoding_iter = 0
        self.cached_tokens = 0
        self.avg_decoded_tokens_per_iter: float | None = None
        self.metrics_dict: dict[Any, Any] = {}
        self.candidate_metrics: list[dict[Any, Any]] = []
        self.tokenizer: Any = None
        self._prompt_token_ids = prompt
        self._done = False
        self._error: BaseException | None = None
        self._aborted = False
        self._executor = weakref.ref(executor)
        self._loop = asyncio.get_running_loop()
        self._responses: asyncio.Queue[Response | BaseException] = asyncio.Queue()
        self._outputs = [CompletionOutput(index) for index in range(params.best_of or 1)]

    @property
    def request_id(self) -> int:
        """Return the engine's id of the request."""
        return self.id

    @property
    def prompt_token_ids(self) -> list[int]:
        """Return the prompt's tokens, media expanded."""
        return self._prompt_token_ids

    @property
    def outputs(self) -> list[CompletionOutput]:
        """Return the `n` best sequences."""
        return self._outputs[: self.sampling_params.n]

    @property
    def finished(self) -> bool:
        """Return whether no further response comes."""
        return self._done

    def abort(self) -> None:
        """Cancel the request; its last response then says `cancelled`. After its end this does nothing."""
        executor = self._executor()
        assert executor is not None, "The executor is not set for this result."
        executor.abort_request(self.request_id)
        self._aborted = True

    def aborted(self) -> bool:
        """Return whether `abort` was called."""
        return self._aborted

    def put(self, response: Response | BaseException) -> None:
        """Take a response, on any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._responses.put_nowait, response)

    async def aresult(self) -> Self:
        """Return this result at its end; raise RequestError, or EngineDeadError."""
        self._check()
        while not self._done:
            await self._step()
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self.aresult().__await__()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Self:
        self._check()
        if self._done:
            raise StopAsyncIteration
        await self._step()
        return self

    def __hash__(self) -> int:
        return hash(self.request_id)

    # --------------------------------------------------------------------------------------- responses
    async def _step(self) -> None:
        self._take(await self._responses.get())

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _take(self, response: Response | BaseException) -> None:
        if isinstance(response, Response) and response.error is not None:
            response = RequestError(response.error)
        if isinstance(response, BaseException):
            self._done, self._error = True, response
            raise response
        self._done = response.is_final
        self.decoding_iter, self.cached_tokens = response.iteration, response.cached_tokens or self.cached_tokens
        self.avg_decoded_tokens_per_iter = 1.0
        if response.context_state is not None:
            self.disaggregated_params = self._handed_over(response)
        if response.mm_handles is not None:
            self.disaggregated_params = DisaggregatedParams(
                multimodal_embedding_handles=response.mm_handles, multimodal_hashes=response.mm_hashes
            )
        if response.finish == "cancelled":
            for each in self._outputs:
                each.finish_reason = "cancelled"
            return
        self._extend(self._outputs[response.sequence], response)

    def _handed_over(self, response: Response) -> DisaggregatedParams:
        asked = self.disaggregated_params
        assert asked is not None
        logprobs = response.logprobs
        return DisaggregatedParams(
            request_type="context_only",
            first_gen_tokens=list(response.token_ids),
            first_gen_log_probs=None if logprobs is None else [_named(each) for each in logprobs],
            ctx_request_id=asked.disagg_request_id or self.request_id,
            opaque_state=response.context_state,
            disagg_request_id=asked.disagg_request_id,
            ctx_dp_rank=asked.ctx_dp_rank,
        )

    def _extend(self, output: CompletionOutput, response: Response) -> None:
        assert output.token_ids is not None
        output.disaggregated_params = self.disaggregated_params
        output.request_perf_metrics = response.perf
        output.token_ids.extend(response.token_ids)
        if response.logprobs is not None:
            output.logprobs += [_named(each) for each in response.logprobs[len(output.logprobs) :]]
            chosen = zip(output.token_ids, output.logprobs, strict=False)
            output.cumulative_logprob = sum(each[token].logprob for token, each in chosen)
        if self.sampling_params.prompt_logprobs and not output.prompt_logprobs:
            output.prompt_logprobs = [{token: Logprob(-1.0, 1)} for token in self._prompt_token_ids]
        if self._done:
            self._finish(output, response)

    def _finish(self, output: CompletionOutput, response: Response) -> None:
        if response.finish == "not_finished":
            output.finish_reason = "not_finished"
        elif response.finish is not None:
            output.finish_reason = FINISH_REASONS[response.finish]
        if response.finish == "stop_words" and not self.sampling_params.include_stop_str_in_output:
            output.token_ids = (output.token_ids or [])[:-1]
        self._measure(output)

    def _measure(self, output: CompletionOutput) -> None:
        measured: dict[Any, Any] = {MetricsCollector.labelname_finish_reason: output.finish_reason}
        if output.request_perf_metrics is not None:
            times = output.request_perf_metrics.timing_metrics
            arrived, last = times.arrival_time, times.last_token_time
            measured |= {
                _MetricNames.E2E: (last - arrived).total_seconds(),
                _MetricNames.TTFT: (times.first_token_time - arrived).total_seconds(),
                _MetricNames.REQUEST_QUEUE_TIME: (times.first_scheduled_time - arrived).total_seconds(),
            }
            if output.length > 1 and self.sampling_params.n == 1:
                measured[_MetricNames.TPOT] = (last - times.first_token_time).total_seconds() / (output.length - 1)
        self.metrics_dict = measured
        if control.version.startswith("1.4"):
            self.candidate_metrics.append(measured)


def _named(told: Any) -> dict[int, Logprob]:
    return {token: each if isinstance(each, Logprob) else Logprob(*each) for token, each in told.items()}
