"""From a call of `generate_async` to a request of the engine, with what is refused only later.

max_tokens      none: what is left below `max_seq_len`; more than is left: cut to it
refused later   by `failure`, in the request's first iteration: `Request.failure` becomes a RequestError while iterating
"""

# ruff: noqa: TID252  by its own name mypy would look for the real package

from collections.abc import Callable
from typing import Any

from .cache import Identity
from .control import control
from .engine import STATE, layout_of, state_of
from .media import MediaItem, keys_between
from .requests import Request, Response

OVERLAP_CANDIDATE = 1
"""The candidate of 1.3.0 from which context-only requests go with the overlap scheduler: PR #10755."""
Built = tuple[Request, Any]


def build_request(
    executor: Any,
    args: Any,
    prompt: list[int],
    params: Any,
    kind: str,
    media: list[MediaItem],
    *,
    streaming: bool,
    lora: Any,
    disaggregated: Any,
    scheduling: Any,
    cache_salt: str | None,
) -> Callable[[int], Built]:
    """Return what makes the request and its result, once it has an id."""
    from ..executor.result import GenerationResult  # noqa: PLC0415  it needs this package

    longest = control.model.seq_len_of(args.max_seq_len)
    room = longest - len(prompt)
    asked = params.max_tokens

    def build(request_id: int) -> Built:
        result = GenerationResult(request_id, prompt, params, disaggregated, executor)

        def sink(response: Response) -> None:
            if response.is_final:
                executor.answered(request_id)
            result.put(response)

        request = Request(
            request_id=request_id,
            prompt=list(prompt),
            params=params,
            sink=sink,
            streaming=streaming,
            max_tokens=max(0, room if asked is None else min(asked, room)),
            identity=_identity(lora, cache_salt, media),
            dp_rank=None if scheduling is None else scheduling.attention_dp_rank,
            kind=kind,
            disaggregated=disaggregated,
            media=media,
        )
        request.failure = control.next_failure() or _refused(args, request, room)
        return request, result

    return build


def _identity(lora: Any, cache_salt: str | None, media: list[MediaItem]) -> Identity:
    return Identity(
        lora_id=None if lora is None else lora.lora_int_id,
        cache_salt=cache_salt,
        mm_keys=lambda start, end: keys_between(media, start, end),
    )


def _refused(args: Any, request: Request, room: int) -> str | None:
    ranks = args.tensor_parallel_size if args.enable_attention_dp else 1
    if not request.prompt:
        return "The prompt is empty."
    if room <= 0:
        return f"The prompt length ({len(request.prompt)}) leaves no room for a token below max_seq_len."
    if request.dp_rank is not None and not 0 <= request.dp_rank < ranks:
        return f"attention_dp_rank ({request.dp_rank}) must be in [0, {ranks})."
    if request.kind not in {"context_only", "generation_only"}:
        return None
    transceiver = args.cache_transceiver_config
    if transceiver is None or transceiver.backend is None:
        return f"A {request.kind} request needs cache_transceiver_config.backend."
    if request.kind == "context_only" and control.is_before(OVERLAP_CANDIDATE) and not args.disable_overlap_scheduler:
        return "Context only requests are not supported in pytorch backend when overlap is enabled."
    if request.kind == "generation_only":
        return _refused_state(request, args)
    return None


def _refused_state(request: Request, args: Any) -> str | None:
    handed = request.disaggregated
    if not handed.first_gen_tokens:
        return "A generation_only request needs first_gen_tokens."
    if handed.opaque_state is None or not handed.opaque_state.startswith(STATE):
        return "The opaque state of the context worker cannot be read."
    if not handed.opaque_state.startswith(layout_of(args)):
        return "The KV cache of the context worker is of another data type, block size or transceiver backend."
    if not handed.opaque_state.startswith(state_of(request.prompt, args)):
        return "The opaque state is of another prompt."
    return None
