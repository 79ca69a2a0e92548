"""Turns TensorRT-LLM's cumulative outputs into their new parts.

    the engine's reason   ours       because
    stop, length          the same
    not_finished          length     a context-only request made its one token; the engine reports this or `length`
    timeout               error
    cancelled             none       the agent cancelled it, or the engine ends: `is_cancelled`, never an output
    none, at the end      length     the choice has `max_tokens` tokens
                          stop       it has fewer. The engine names a reason only for the choice that ends last
                          error      it has no token
    any other             error      unknown reason

    tokens of choice i    token_ids[sent:]; the list may shrink if the engine cuts off a stop word that was sent
    cached tokens         the engine's count, at most the prompt's
    KV that was moved     bytes and time of the transfer, if the engine measures it
    log probabilities     by the token's position; None at an unknown position

Source: NVIDIA/TensorRT-LLM, `tensorrt_llm/executor/result.py` (`_handle_sequence` sets the reason only if `_done`);
`docs/SOURCES.md` D6.5.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from worker_agent.port.handoff import handoff_of
from worker_agent.port.sampling import TokenLogprob, TokenLogprobs
from worker_agent.port.types import EngineOutput, EngineRequest, FinishReason, KvFetches

_FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "not_finished": "length"}
CANCELLED = "cancelled"


class Outputs:
    """One request's outputs, and how much of them was passed on."""

    def __init__(
        self,
        request: EngineRequest,
        *,
        expanded: tuple[int, ...] = (),
        hands_over: bool = False,
        transfers: KvFetches | None = None,
    ) -> None:
        """`hands_over`: the engine makes one token, and another worker continues.

        `expanded` is the prompt with its media's tokens; the first output of each choice carries it. If another
        worker computed the prompt, its measured transfer is added to `transfers`.
        """
        self._prompt, self._expanded = expanded or request.prompt, expanded
        self._max_tokens, self._logprobs = 1 if hands_over else request.max_tokens, request.sampling.logprobs
        self._hands_over, self._transfers = hands_over, transfers
        self._sent: dict[int, int] = {}
        self._open = set(range(request.sampling.choices))
        self._cached_tokens = 0
        self.is_cancelled = False

    @property
    def has_begun(self) -> bool:
        """Whether there was any output."""
        return bool(self._sent)

    @property
    def is_over(self) -> bool:
        """Whether every choice has ended."""
        return not self._open

    def new(self, result: Any) -> list[EngineOutput]:  # noqa: ANN401 - the library's `RequestOutput`
        """Return the new part of `result`, without choices that have ended."""
        self.is_cancelled = any(each.finish_reason == CANCELLED for each in result.outputs)
        if self.is_cancelled:
            return []
        new = [self._of(each, result) for each in result.outputs if each.index in self._open]
        return [each for each in new if each is not None]

    def failed(self) -> list[EngineOutput]:
        """Return the last output of each choice that has not ended: an error."""
        ended, self._open = sorted(self._open), set()
        return [
            EngineOutput(token_ids=(), cached_tokens=self._cached_tokens, finish_reason="error", choice=choice)
            for choice in ended
        ]

    def _of(self, choice: Any, result: Any) -> EngineOutput | None:  # noqa: ANN401 - its `CompletionOutput`
        tokens, sent = choice.token_ids or [], self._sent.get(choice.index, 0)
        reason = finish_reason(choice.finish_reason)
        if reason is None and result.finished:
            reason = "error" if not tokens else "length" if len(tokens) >= self._max_tokens else "stop"
        if len(tokens) <= sent and reason is None:
            return None
        is_first = choice.index not in self._sent
        self._sent[choice.index] = max(sent, len(tokens))
        self._cached_tokens = min(result.cached_tokens or 0, len(self._prompt))
        self._measure_transfer(choice)
        params = choice.disaggregated_params
        if reason is not None:
            self._open.remove(choice.index)
        return EngineOutput(
            token_ids=tuple(tokens[sent:]),
            cached_tokens=self._cached_tokens,
            finish_reason=reason,
            choice=choice.index,
            logprobs=self._new_logprobs(choice, sent, len(tokens)),
            prompt_logprobs=_token_logprobs(self._prompt, choice.prompt_logprobs) if is_first else (),
            handoff=handoff_of(params) if self._hands_over and params is not None else None,
            prompt=self._expanded if is_first else (),
        )

    def _new_logprobs(self, choice: Any, sent: int, end: int) -> tuple[TokenLogprobs | None, ...]:  # noqa: ANN401
        if self._logprobs is None:
            return ()
        reported = (choice.logprobs or [])[sent:end]
        logprobs = _token_logprobs((choice.token_ids or [])[sent:end], reported, self._logprobs)
        return logprobs + (None,) * (max(0, end - sent) - len(logprobs))

    def _measure_transfer(self, choice: Any) -> None:  # noqa: ANN401 - as above
        """Count the transfer once the engine has measured it."""
        timing = getattr(choice.request_perf_metrics, "timing_metrics", None)
        moved = getattr(timing, "kv_cache_size", 0)
        if self._transfers is not None and timing is not None and moved:
            took = timing.kv_cache_transfer_end - timing.kv_cache_transfer_start
            self._transfers.by_outcome["done"] += 1
            self._transfers.fetched_bytes += int(moved)
            self._transfers.seconds += max(0.0, took.total_seconds())
            self._transfers = None


def finish_reason(reason: str | None) -> FinishReason | None:
    """Return the finish reason for the engine's, by the table above; None if it names none."""
    return None if reason is None else _FINISH_REASONS.get(reason, "error")


def _token_logprobs(
    tokens: Sequence[int], reported: Sequence[Any] | None, top: int | None = None
) -> tuple[TokenLogprobs | None, ...]:
    return tuple(_logprobs_of(token, each, top) for token, each in zip(tokens, reported or (), strict=False))


def _logprobs_of(token: int, reported: Any, top: int | None) -> TokenLogprobs | None:  # noqa: ANN401 - as the engine says it
    if isinstance(reported, int | float):
        return TokenLogprobs(chosen=TokenLogprob(token_id=token, logprob=float(reported)))
    if not isinstance(reported, Mapping) or token not in reported:
        return None
    ranked = sorted(reported.items(), key=lambda item: -item[1].logprob)
    return TokenLogprobs(
        chosen=_logprob(token, reported[token]), top=tuple(_logprob(each, logprob) for each, logprob in ranked[:top])
    )


def _logprob(token: int, reported: Any) -> TokenLogprob:  # noqa: ANN401 - the engine's `Logprob`
    return TokenLogprob(token_id=token, logprob=float(reported.logprob), rank=reported.rank)
