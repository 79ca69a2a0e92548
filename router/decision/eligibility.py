"""Which ranks may take a request, and which are preferred.

A rank is excluded if one of these reasons applies; the first that does is stated:

    unfit          its worker drains or is silent (`Fleet`); its breaker is open, or it said it is busy (`Breakers`)
    endpoint       it does not state the request's OpenAI endpoint (`kv_protocol/openai/endpoints.py`)
    role           it serves other phases than the request's (`ROLES`)
    domain         the prompt's KV lies in another transfer domain, from which it cannot fetch
    transfer       the prompt's KV cannot be transferred: it is longer than the worker's buffer, a decode worker cannot
                   take blocks of the prefill worker that has it (`misfit`), or no decode worker can take this worker's
    lora           the request names an adapter that the worker has not loaded; every worker serves the base model
    taint          the request requires a taint that the worker does not carry: `required_taints` must be a subset of
                   its `taints`. A taint does not exclude requests that require none
    max_seq_len    prompt and answer do not fit; not checked if the prompt was not encoded (`known_tokens` 0). Likewise
                   a prompt above `max_prompt_tokens`, except in a phase that gets its KV from another worker
    pinned         the request names another worker or rank
    gateway        a gateway sends the request, and cannot reach the worker or does not offer it
    tried          it failed this request

    multiplier of the cost = exp(-tanh(sum of the weights of preferred taints that the worker carries)), in [1/e, e]

A positive weight makes a worker cheaper, a negative one dearer by the same factor, and opposite ones cancel out.
Source: `docs/SOURCES.md` D1.5.

The core asks for exclusions only if a request differs from others of its kind: `is_constrained` in
`router/native/decide_module.cpp`.
"""

import math
from collections.abc import Mapping, Sequence

from kv_protocol.decided import RouteRequest
from kv_protocol.decision import Exclusion
from kv_protocol.errors import shortened
from kv_protocol.fleet import WorkerRegistered
from kv_protocol.ids import WorkerRank
from kv_protocol.openai.endpoints import stated_words
from router.decision.policy import Policy
from router.decision.view import ModelView
from router.fleet.registry import kinds, misfit


class NoEligibleWorker(Exception):
    """No rank may take the request. `exclusions` has the reason of every rank, the message those of the first ones.

    `kinds` has the kind of every rank's reason (`reason_kind`); a reason that lies in the request counts first.
    """

    def __init__(self, model: str, exclusions: tuple[Exclusion, ...], kinds: frozenset[str] = frozenset()) -> None:
        reasons = [f"{each.worker_id}/{each.dp_rank}: {each.reason}" for each in exclusions[:_NAMED_MAX]]
        why = _some(reasons, len(exclusions), "; ") or "none is registered"
        super().__init__(f"no worker for model {model!r}: {why}")
        self.exclusions, self.kinds = exclusions, kinds


class WorkerNotNamed(Exception):
    """The mode requires the client to name a worker, and it did not: the client's fault."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        some = _some(allowed[:_NAMED_MAX], len(allowed), ", ")
        super().__init__(f"x-worker-instance-id: found none, and mode direct needs one; allowed {some}")
        self.field = "x-worker-instance-id"


_NAMED_MAX = 8


def _some(named: Sequence[str], count: int, separator: str) -> str:
    """Join the names, and add how many of the `count` are missing."""
    more = count - len(named)
    return separator.join(named) + (f" and {more} more" if more > 0 else "")


ROLES: dict[str, tuple[str, ...]] = {
    "whole": ("aggregated",),
    "prefill": ("prefill",),
    "decode": ("decode",),
    "alone": ("decode", "aggregated"),
}
"""The roles that serve each phase."""

_NO_MISFITS: Mapping[str, str] = {}
_LASTING = ("endpoint", "lora", "taint", "pinned", "max_seq_len", "max_prompt_tokens")
"""How reasons begin that the request itself causes."""


def constraints(view: ModelView, request: RouteRequest, policy: Policy) -> tuple[tuple[str, ...], list[float] | None]:
    """Return why each rank may not take the request (empty: it may), and each one's cost factor (None: all are 1).

    Raises:
        NoEligibleWorker: no rank may take the request.
        WorkerNotNamed: the policy's mode requires the client to name a worker, and it did not.
    """
    why = exclusions(view, request)
    if all(why):
        rows = zip(view.registrations, view.ranks, why, strict=True)
        kinds = frozenset(reason_kind(exclusion(of, rank, request) or reason) for of, rank, reason in rows)
        raise NoEligibleWorker(request.model, exclusions_of(view.ranks, why), kinds)
    if policy.mode == "direct" and request.pinned_worker is None:
        allowed = (rank.worker_id for rank, reason in zip(view.ranks, why, strict=True) if not reason)
        raise WorkerNotNamed(tuple(dict.fromkeys(allowed)))
    preferred = request.preferred_taints
    return why, [_multiplier(each.taints, preferred) for each in view.registrations] if preferred else None


def exclusions_of(ranks: Sequence[WorkerRank], why: Sequence[str]) -> tuple[Exclusion, ...]:
    """Return the ranks that have a reason, and the reason."""
    rows = zip(ranks, why, strict=True)
    return tuple(Exclusion(worker_id=rank.worker_id, dp_rank=rank.dp_rank, reason=each) for rank, each in rows if each)


def exclusions(view: ModelView, request: RouteRequest) -> tuple[str, ...]:
    """Return for every rank of the view why it may not take the request; empty if it may."""
    apart = _apart(view, request)
    return tuple(
        unfit or exclusion(registration, rank, request, apart)
        for unfit, registration, rank in zip(view.unfit, view.registrations, view.ranks, strict=True)
    )


def _apart(view: ModelView, request: RouteRequest) -> Mapping[str, str] | None:
    """Return the workers that KV cannot be transferred from or to, with the reason; None: the request transfers no KV.

    A prefill worker has a reason if no decode worker can take its blocks.
    """
    if request.prefill_worker is None:
        return None if request.transfer_domain is None else _NO_MISFITS
    if not view.has_misfits:
        return _NO_MISFITS
    key = request.prefill_worker if request.phase == "decode" else None
    apart = view.apart.get(key)
    if apart is None:
        apart = view.apart[key] = _without_partner(view) if key is None else _misfits_of(view, key)
    return apart


def _misfits_of(view: ModelView, prefill_worker: str) -> dict[str, str]:
    """Return by decode worker why it cannot take the blocks of the prefill worker."""
    prefills = [each for each in view.registrations if each.worker_id == prefill_worker]
    decodes = [each for each in view.registrations if each.role == "decode"]
    return {each.worker_id: misfit(prefill, each) for prefill in prefills[:1] for each in decodes}


def _without_partner(view: ModelView) -> dict[str, str]:
    """Return the prefill workers that no decode worker can take blocks of, each with the reason."""
    decodes = {each.worker_id: each for each in view.registrations if each.role == "decode"}
    alike = kinds(decodes.values(), "decode")
    return {
        each.worker_id: f"kv transfer: none of {len(decodes)} decode workers can take its blocks"
        for each in view.registrations
        if each.role == "prefill" and decodes and all(misfit(each, decode) for decode in alike)
    }


def exclusion(
    registration: WorkerRegistered,
    rank: WorkerRank,
    request: RouteRequest,
    apart: Mapping[str, str] | None = _NO_MISFITS,
) -> str:
    """Return why the rank may not take the request, apart from its fitness; empty if it may.

    `apart` has the workers that the KV cannot be transferred from or to, with the reason; None: no transfer is needed.
    """
    if request.endpoint not in registration.api_endpoints:
        return f"endpoint {request.endpoint}: the worker states {stated_words(registration.api_endpoints)}"
    if registration.role not in ROLES[request.phase]:
        roles = " or ".join(ROLES[request.phase])
        return f"role {registration.role}: {request.phase} is asked of workers that are {roles}"
    if apart is not None and (transfer := _transfer_exclusion(registration, request, apart)):
        return transfer
    if request.lora and request.lora not in registration.loras:
        return f"lora: found {request.lora!r}, allowed {', '.join(registration.loras) or 'none'}"
    for taint in request.required_taints:
        if taint not in registration.taints:
            return f"taint {taint!r} is required, the worker has {', '.join(registration.taints) or 'none'}"
    if too_long := _too_long(registration, request):
        return too_long
    return _other(rank, request)


def _other(rank: WorkerRank, request: RouteRequest) -> str:
    """Return why the request wants another rank; empty if it does not."""
    if request.pinned_worker not in (None, rank.worker_id):
        return f"pinned to {shortened(request.pinned_worker or '')}"
    if request.pinned_dp_rank not in (None, rank.dp_rank):
        return f"pinned to dp_rank {request.pinned_dp_rank}"
    if request.allowed_workers is not None and rank.worker_id not in request.allowed_workers:
        return "gateway: it does not offer this endpoint, or the worker's URL has no IP address"
    return "failed this request" if rank in request.tried else ""


def _too_long(registration: WorkerRegistered, request: RouteRequest) -> str:
    """Return why prompt and answer do not fit the worker; empty if they fit, or the prompt was not encoded."""
    answer_tokens, allowed = max(1, request.max_tokens), registration.max_seq_len
    if allowed and request.known_tokens and request.isl_tokens + answer_tokens > allowed:
        return f"max_seq_len: {request.isl_tokens} + {answer_tokens} tokens, at most {allowed}"
    if (
        registration.max_prompt_tokens
        and request.phase != "decode"
        and request.known_tokens > registration.max_prompt_tokens
    ):
        return f"max_prompt_tokens: {request.isl_tokens} tokens, at most {registration.max_prompt_tokens}"
    return ""


def _transfer_exclusion(registration: WorkerRegistered, request: RouteRequest, apart: Mapping[str, str]) -> str:
    """Return why the prompt's KV cannot be transferred from or to the worker; empty if it can, or need not be."""
    if request.transfer_domain not in (None, registration.transfer_domain):
        return f"transfer_domain {registration.transfer_domain!r}: the prompt's KV lies in {request.transfer_domain!r}"
    if request.prefill_worker is None:
        return ""
    if 0 < registration.transfer_buffer_tokens < request.known_tokens:
        return f"kv transfer: {request.isl_tokens} tokens, transfer_buffer_tokens {registration.transfer_buffer_tokens}"
    return apart.get(registration.worker_id, "")


def _multiplier(taints: tuple[str, ...], preferred: tuple[tuple[str, float], ...]) -> float:
    return math.exp(-math.tanh(math.fsum(weight for taint, weight in preferred if taint in taints)))


def reason_kind(reason: str) -> str:
    """Return the kind of a reason: one of `_LASTING` if the request itself is the cause, `other` if not.

    Prompts that are too long have one kind, `max_seq_len`.
    """
    kind = next((each for each in _LASTING if reason.startswith(each)), "other")
    return "max_seq_len" if kind == "max_prompt_tokens" else kind


BATCHED_TOKENS_DEFAULT = 8192
"""Assumed for a worker that does not state its max_num_batched_tokens."""


def is_below(threshold: float, view: ModelView, queued_tokens: Sequence[int], request: RouteRequest) -> bool:
    """Return whether some eligible rank is at its threshold or below: O(ranks); true also if no rank is eligible.

    A rank is over its threshold while more uncached tokens are queued there than `threshold` x max_num_batched_tokens
    of its worker. A threshold of 0 is the most sensitive: a rank with any queued prefill is over it.
    """
    apart = _apart(view, request)

    def is_eligible(place: int) -> bool:
        unfit, registration, rank = view.unfit[place], view.registrations[place], view.ranks[place]
        return not (unfit or exclusion(registration, rank, request, apart))

    limits = (threshold * (each.max_num_batched_tokens or BATCHED_TOKENS_DEFAULT) for each in view.registrations)
    below = (place for place, limit in enumerate(limits) if queued_tokens[place] <= limit)
    return any(map(is_eligible, below)) or not any(map(is_eligible, range(len(view.ranks))))
