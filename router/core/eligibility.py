"""Who may take a request, and who would be preferred.

The first that holds says why a rank may not:

    unfit          draining, silent, its breaker is open, it asked to be left alone (`Fleet`, `Breakers`)
    endpoint       it does not state the request's OpenAI endpoint (`kv_protocol/api_endpoints.py`)
    role           it serves other phases than the request's (`ROLES`)
    domain         the prompt's KV lies where it cannot fetch it from: in another transfer domain
    lora           the request names an adapter that the worker has not loaded; the base model is everybody's
    taint          the request requires a taint that the worker does not carry: `required_taints` must be a subset of
                   its `taints`. A taint keeps nobody away who does not ask
    max_seq_len    prompt and answer do not fit; not asked where the prompt was not encoded (`isl_tokens` 0). Likewise
                   a prompt above `max_prompt_tokens`, but of a phase that takes its KV from another worker
    pinned         the request names another worker or rank
    tried          it failed this request

    multiplier = exp(-tanh(sum of the weights of preferred taints that the worker carries)), in [1/e, e]

A positive weight makes a worker cheaper, a negative one dearer by the same factor, and opposite ones cancel out.
Source: `routing.md`, "Constraints"; `dynamo_reference.md` 1.5.

Where every rank is known to be fit and whole (`View.whole`), a request that constrains nothing costs no look at any.
"""

import math
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from kv_protocol.api_endpoints import DEFAULT_ENDPOINTS, stated_words
from kv_protocol.errors import shortened
from kv_protocol.fleet import WorkerRegistered
from kv_protocol.ids import WorkerRank
from router.core.view import RouteRequest

ReasonKind = Literal[
    "draining",
    "silent",
    "breaker",
    "busy",
    "endpoint",
    "role",
    "domain",
    "lora",
    "taint",
    "max_seq_len",
    "pinned",
    "tried",
    "newcomer",
    "other",
]
REASON_KINDS: tuple[ReasonKind, ...] = get_args(ReasonKind)

ROLES: dict[str, tuple[str, ...]] = {
    "whole": ("aggregated",),
    "prefill": ("prefill",),
    "decode": ("decode",),
    "alone": ("decode", "aggregated"),
}
"""Who may be asked for a phase."""

_KIND_OF_BEGINNING: tuple[tuple[str, ReasonKind], ...] = (
    ("draining", "draining"),
    ("silent", "silent"),
    ("no heartbeat", "silent"),
    ("breaker", "breaker"),
    ("busy", "busy"),
    ("endpoint", "endpoint"),
    ("role", "role"),
    ("transfer_domain", "domain"),
    ("lora", "lora"),
    ("taint", "taint"),
    ("max_seq_len", "max_seq_len"),
    ("max_prompt_tokens", "max_seq_len"),
    ("pinned", "pinned"),
    ("failed this request", "tried"),
    ("newcomer", "newcomer"),
)


class Ranks(Protocol):
    """The ranks that serve a model, as a view has them; place i of each speaks of `ranks[i]`."""

    @property
    def ranks(self) -> tuple[WorkerRank, ...]:
        """Who they are."""

    @property
    def told(self) -> tuple[WorkerRegistered, ...]:
        """The registration behind each."""

    @property
    def unfit(self) -> tuple[str, ...]:
        """Why each takes no new work; empty when it may."""

    @property
    def whole(self) -> bool:
        """All are known to be fit, and to serve whole chats and completions."""

    @property
    def seq_len_min(self) -> int:
        """The smallest `max_seq_len` or `max_prompt_tokens` that a worker states; 0: none does."""


def exclusions(view: Ranks, request: RouteRequest) -> tuple[str, ...]:
    """Return of every rank of the view why it may not take the request; empty where it may."""
    if view.whole and not constrains(request, view.seq_len_min):
        return view.unfit  # all of them empty
    return tuple(
        unfit or exclusion(told, rank, request)
        for unfit, told, rank in zip(view.unfit, view.told, view.ranks, strict=True)
    )


def constrains(request: RouteRequest, seq_len_min: int) -> bool:
    """Return whether the request can exclude a rank that is fit and serves whole chats and completions.

    `seq_len_min` is the smallest `max_seq_len` or `max_prompt_tokens` that a worker states; 0: none does.
    """
    return bool(
        request.endpoint not in DEFAULT_ENDPOINTS
        or request.phase != "whole"
        or request.lora
        or request.required_taints
        or (seq_len_min and request.isl_tokens and _tokens(request) > seq_len_min)
        or request.pinned_worker is not None
        or request.pinned_dp_rank is not None
        or request.tried
    )


def _tokens(request: RouteRequest) -> int:
    return request.isl_tokens + max(1, request.max_tokens)


def exclusion(told: WorkerRegistered, rank: WorkerRank, request: RouteRequest) -> str:
    """Return why the rank may not take the request, however fit it is; empty where it may."""
    if request.endpoint not in told.api_endpoints:
        return f"endpoint {request.endpoint}: the worker states {stated_words(told.api_endpoints)}"
    if told.role not in ROLES[request.phase]:
        return f"role {told.role}: {request.phase} is asked of workers that are {' or '.join(ROLES[request.phase])}"
    if request.transfer_domain not in (None, told.transfer_domain):
        return f"transfer_domain {told.transfer_domain!r}: the prompt's KV lies in {request.transfer_domain!r}"
    if request.lora and request.lora not in told.loras:
        return f"lora: found {request.lora!r}, allowed {', '.join(told.loras) or 'none'}"
    for taint in request.required_taints:
        if taint not in told.taints:
            return f"taint {taint!r} is required, the worker has {', '.join(told.taints) or 'none'}"
    if too_long := _too_long(told, request):
        return too_long
    if request.pinned_worker not in (None, rank.worker_id):
        return f"pinned to {shortened(request.pinned_worker or '')}"
    if request.pinned_dp_rank not in (None, rank.dp_rank):
        return f"pinned to dp_rank {request.pinned_dp_rank}"
    return "failed this request" if rank in request.tried else ""


def _too_long(told: WorkerRegistered, request: RouteRequest) -> str:
    """Return why the worker has no room for prompt and answer; empty where it has, or the prompt was not encoded."""
    if told.max_seq_len and request.isl_tokens and _tokens(request) > told.max_seq_len:
        return f"max_seq_len: {request.isl_tokens} + {max(1, request.max_tokens)} tokens, at most {told.max_seq_len}"
    if told.max_prompt_tokens and request.phase != "decode" and request.isl_tokens > told.max_prompt_tokens:
        return f"max_prompt_tokens: {request.isl_tokens} tokens, at most {told.max_prompt_tokens}"
    return ""


def multipliers(view: Ranks, request: RouteRequest) -> NDArray[np.float64] | None:
    """Return what each rank's cost is multiplied by, all > 0; None where the request prefers nothing."""
    preferred = request.preferred_taints
    if not preferred:
        return None
    return np.array([_multiplier(told.taints, preferred) for told in view.told], dtype=np.float64)


def _multiplier(taints: tuple[str, ...], preferred: tuple[tuple[str, float], ...]) -> float:
    return math.exp(-math.tanh(math.fsum(weight for taint, weight in preferred if taint in taints)))


def reason_kind(reason: str) -> ReasonKind:
    """Return which of `REASON_KINDS` an exclusion's reason is, for whoever counts them."""
    return next((kind for beginning, kind in _KIND_OF_BEGINNING if reason.startswith(beginning)), "other")
