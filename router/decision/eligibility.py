"""Which ranks may take a request, and which are preferred.

The first that holds says why a rank may not:

    unfit          draining, silent, its breaker is open, it asked to be left alone (`Fleet`, `Breakers`)
    endpoint       it does not state the request's OpenAI endpoint (`kv_protocol/api_endpoints.py`)
    role           it serves other phases than the request's (`ROLES`)
    domain         the prompt's KV lies where it cannot fetch it from: in another transfer domain
    transfer       the prompt's KV cannot be transferred: it is longer than the worker's buffer, a decode worker cannot
                   take blocks of the prefill worker that has it (`pairs.py`), or no decode worker can take this one's
    lora           the request names an adapter that the worker has not loaded; the base model is everybody's
    taint          the request requires a taint that the worker does not carry: `required_taints` must be a subset of
                   its `taints`. A taint keeps nobody away who does not ask
    max_seq_len    prompt and answer do not fit; not asked where the prompt was not encoded (`isl_tokens` 0). Likewise
                   a prompt above `max_prompt_tokens`, but of a phase that takes its KV from another worker
    pinned         the request names another worker or rank
    tried          it failed this request

    multiplier = exp(-tanh(sum of the weights of preferred taints that the worker carries)), in [1/e, e]

A positive weight makes a worker cheaper, a negative one dearer by the same factor, and opposite ones cancel out.
Source: `docs/SOURCES.md` D1.5.

Where every rank is known to be fit and whole (`View.whole`), a request that constrains nothing costs no look at any.
"""

import math
from collections.abc import Mapping
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from kv_protocol.api_endpoints import DEFAULT_ENDPOINTS, stated_words
from kv_protocol.errors import shortened
from kv_protocol.fleet import WorkerRegistered
from kv_protocol.ids import WorkerRank
from router.decision.view import RouteRequest

ReasonKind = Literal[
    "draining",
    "silent",
    "breaker",
    "busy",
    "endpoint",
    "role",
    "domain",
    "transfer",
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

_NO_MISFITS: Mapping[str, str] = {}
_KIND_OF_BEGINNING: tuple[tuple[str, ReasonKind], ...] = (
    ("draining", "draining"),
    ("silent", "silent"),
    ("no heartbeat", "silent"),
    ("breaker", "breaker"),
    ("busy", "busy"),
    ("endpoint", "endpoint"),
    ("role", "role"),
    ("transfer_domain", "domain"),
    ("kv transfer", "transfer"),
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
    def registrations(self) -> tuple[WorkerRegistered, ...]:
        """The registration behind each."""

    @property
    def unfit(self) -> tuple[str, ...]:
        """Why each takes no new work; empty when it may."""

    @property
    def is_uniform(self) -> bool:
        """All are known to be fit, and to serve whole chats and completions."""

    @property
    def seq_len_min(self) -> int:
        """The smallest `max_seq_len` or `max_prompt_tokens` that a worker states; 0: none does."""

    @property
    def misfits(self) -> Mapping[str, Mapping[str, str]]:
        """Prefill worker id, decode worker id: why the one cannot take the other's KV blocks."""


def exclusions(view: Ranks, request: RouteRequest) -> tuple[str, ...]:
    """Return of every rank of the view why it may not take the request; empty where it may."""
    if view.is_uniform and not constrains(request, view.seq_len_min):
        return view.unfit  # all of them empty
    apart = _apart(view, request)
    return tuple(
        unfit or exclusion(registration, rank, request, apart)
        for unfit, registration, rank in zip(view.unfit, view.registrations, view.ranks, strict=True)
    )


def _apart(view: Ranks, request: RouteRequest) -> Mapping[str, str] | None:
    """Return by worker id why a worker's pair does not work, None for a request of which no KV is transferred.

    Of prefill workers those are named that no decode worker fits.
    """
    if request.prefill_worker is None:
        return None if request.transfer_domain is None else _NO_MISFITS
    if not view.misfits:
        return _NO_MISFITS
    if request.phase == "decode":
        return view.misfits.get(request.prefill_worker or "", _NO_MISFITS)
    decoders = {registration.worker_id for registration in view.registrations if registration.role == "decode"}
    return {
        prefill: f"kv transfer: none of {len(decoders)} decode workers can take its blocks"
        for prefill, misfits in view.misfits.items()
        if decoders and decoders <= misfits.keys()
    }


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


def exclusion(
    registration: WorkerRegistered,
    rank: WorkerRank,
    request: RouteRequest,
    apart: Mapping[str, str] | None = _NO_MISFITS,
) -> str:
    """Return why the rank may not take the request, however fit it is; empty where it may.

    `apart` are the workers that the request's KV cannot be transferred from or to, with the reason; None: no KV is.
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
    if request.pinned_worker not in (None, rank.worker_id):
        return f"pinned to {shortened(request.pinned_worker or '')}"
    if request.pinned_dp_rank not in (None, rank.dp_rank):
        return f"pinned to dp_rank {request.pinned_dp_rank}"
    return "failed this request" if rank in request.tried else ""


def _too_long(registration: WorkerRegistered, request: RouteRequest) -> str:
    """Return why the worker has no room for prompt and answer; empty where it has, or the prompt was not encoded."""
    if registration.max_seq_len and request.isl_tokens and _tokens(request) > registration.max_seq_len:
        allowed = registration.max_seq_len
        return f"max_seq_len: {request.isl_tokens} + {max(1, request.max_tokens)} tokens, at most {allowed}"
    if (
        registration.max_prompt_tokens
        and request.phase != "decode"
        and request.isl_tokens > registration.max_prompt_tokens
    ):
        return f"max_prompt_tokens: {request.isl_tokens} tokens, at most {registration.max_prompt_tokens}"
    return ""


def _transfer_exclusion(registration: WorkerRegistered, request: RouteRequest, apart: Mapping[str, str]) -> str:
    """Return why the prompt's KV cannot be transferred from or to the worker; empty where it can, or need not."""
    if request.transfer_domain not in (None, registration.transfer_domain):
        return f"transfer_domain {registration.transfer_domain!r}: the prompt's KV lies in {request.transfer_domain!r}"
    if request.prefill_worker is None:
        return ""
    if 0 < registration.transfer_buffer_tokens < request.isl_tokens:
        return f"kv transfer: {request.isl_tokens} tokens, transfer_buffer_tokens {registration.transfer_buffer_tokens}"
    return apart.get(registration.worker_id, "")


def multipliers(view: Ranks, request: RouteRequest) -> NDArray[np.float64] | None:
    """Return what each rank's cost is multiplied by, all > 0; None where the request prefers nothing."""
    preferred = request.preferred_taints
    if not preferred:
        return None
    return np.array(
        [_multiplier(registration.taints, preferred) for registration in view.registrations], dtype=np.float64
    )


def _multiplier(taints: tuple[str, ...], preferred: tuple[tuple[str, float], ...]) -> float:
    return math.exp(-math.tanh(math.fsum(weight for taint, weight in preferred if taint in taints)))


def reason_kind(reason: str) -> ReasonKind:
    """Return which of `REASON_KINDS` an exclusion's reason is, for whoever counts them."""
    return next((kind for beginning, kind in _KIND_OF_BEGINNING if reason.startswith(beginning)), "other")
