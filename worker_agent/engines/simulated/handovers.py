"""The handoff of a computed prompt between simulated engines."""

from itertools import chain, repeat

from worker_agent.engines.simulated.sequences import RunningRequest
from worker_agent.engines.simulated.transfer import Fetch
from worker_agent.port.handoff import Handoff
from worker_agent.port.sampling import TokenLogprob, TokenLogprobs
from worker_agent.port.types import EngineOutput


def context_handoff(
    running: RunningRequest, logprobs: tuple[TokenLogprobs | None, ...], name: int, state: bytes
) -> Handoff:
    """Return the handoff of a computed prompt, held as context `name`, with the token after it."""
    top_logprobs = [each.top or (each.chosen,) for each in logprobs if each is not None]
    return Handoff(
        request_type="context_only",
        first_gen_tokens=running.unreported,
        first_gen_log_probs=tuple(top_logprobs) or None,
        ctx_request_id=name,
        disagg_request_id=running.request.transfer_id,
        opaque_state=state,
    )


def fetch_of(running: RunningRequest) -> Fetch:
    """Return the fetch of an admitted request: the KV of all tokens that the engine has not cached."""
    request, handoff = running.request, running.request.handoff
    assert handoff is not None
    return Fetch(
        request_id=request.request_id,
        transfer_id=handoff.ctx_request_id or 0,
        state=handoff.opaque_state or b"",
        tokens=len(request.prompt) - running.cached_tokens,
        endpoint=handoff.ctx_info_endpoint or "",
    )


def resume_after_first_tokens(running: RunningRequest) -> None:
    """Continue a request from the handoff's first tokens, which are not reported yet."""
    handoff = running.request.handoff
    running.unreported = (handoff and handoff.first_gen_tokens) or ()
    running.tokens += running.unreported
    running.prefix_state = running.source.fold(running.unreported, running.prefix_state)


def failed_output(running: RunningRequest) -> EngineOutput:
    """Return the only output of a request whose KV did not come."""
    return EngineOutput(token_ids=(), cached_tokens=running.cached_tokens, finish_reason="error")


def first_logprobs(running: RunningRequest) -> tuple[TokenLogprobs | None, ...]:
    """Return the log probabilities of the handoff's first tokens, which are not reported yet."""
    top, handoff = running.request.sampling.logprobs, running.request.handoff
    if top is None or handoff is None or not running.unreported:
        return ()
    reported = handoff.first_gen_log_probs or ()
    return tuple(
        _first_logprob(token, alternatives, top)
        for token, alternatives in zip(running.unreported, chain(reported, repeat(None)), strict=False)
    )


def _first_logprob(token: int, alternatives: tuple[TokenLogprob, ...] | float | None, top: int) -> TokenLogprobs | None:
    if isinstance(alternatives, float):
        return TokenLogprobs(chosen=TokenLogprob(token_id=token, logprob=alternatives))
    chosen = next((each for each in alternatives or () if each.token_id == token), None)
    return None if chosen is None else TokenLogprobs(chosen=chosen, top=(alternatives or ())[:top])
