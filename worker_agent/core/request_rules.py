"""What an engine is asked for a client's request, and what is refused before it is asked."""

import base64
from collections.abc import Sequence

from kv_protocol.hashing import unpack_tokens
from kv_protocol.openai import GUIDED_KEYS, ChatRequest, CompletionRequest, Request, RequestInvalid, is_given
from worker_agent.core.engine import EngineDescription, EngineRequest
from worker_agent.core.media import Media

_TOKEN_BYTES = 4


def prompt_ids(encoded: str) -> list[int]:
    """Return the token ids in `kv_prompt_ids`: base64 of little-endian u32s; raise `RequestInvalid`."""
    try:
        data = base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise RequestInvalid("kv_prompt_ids", encoded[:16], f"base64 ({error})") from error
    if not data or len(data) % _TOKEN_BYTES:
        raise RequestInvalid("kv_prompt_ids", f"{len(data)} bytes", "one or more little-endian u32s")
    return unpack_tokens(data)


def check_supported(request: Request) -> None:
    """Return when nothing is asked that the engine cannot do; raise `RequestInvalid` otherwise."""
    if request.n not in (None, 1):
        raise RequestInvalid("n", request.n, "1: this worker gives one choice")
    if request.logprobs:
        raise RequestInvalid("logprobs", request.logprobs, "none: this worker gives no log probabilities")
    if isinstance(request, CompletionRequest):
        for field in ("echo", "suffix"):
            if getattr(request, field):
                raise RequestInvalid(field, getattr(request, field), "none on this worker")
    if request.best_of not in (None, 1):
        raise RequestInvalid("best_of", request.best_of, "1: this worker gives one choice")
    for field in GUIDED_KEYS:
        if is_given(getattr(request, field)):
            raise RequestInvalid(field, "a value", "none: this worker guides no decoding")
    if (request.response_format or {}).get("type", "text") != "text":
        raise RequestInvalid("response_format.type", request.response_format, "text: this worker guides no decoding")


def engine_request(
    request: Request,
    prompt: Sequence[int],
    description: EngineDescription,
    *,
    media: tuple[Media, ...] = (),
    request_id: str,
    default_max_tokens: int,
    stop_token_ids: tuple[int, ...] = (),
    dp_rank: int | None = None,
) -> EngineRequest:
    """Return what the engine is asked; raise `RequestInvalid` where the request cannot fit or names no rank of ours."""
    check_supported(request)
    field = "messages" if isinstance(request, ChatRequest) else "prompt"
    room = description.max_seq_len - len(prompt)
    if not prompt:
        raise RequestInvalid(field, "0 tokens", "at least one token")
    if room < 1:
        raise RequestInvalid(field, f"{len(prompt)} tokens", f"at most {description.max_seq_len - 1} tokens")
    if request.limit_tokens is not None and request.limit_tokens > room:
        raise RequestInvalid("max_tokens", request.limit_tokens, f"1..{room} after a prompt of {len(prompt)} tokens")
    if dp_rank is not None and dp_rank not in description.dp_ranks:
        raise RequestInvalid("x-dp-rank", dp_rank, ", ".join(map(str, description.dp_ranks)))
    return EngineRequest(
        request_id=request_id,
        prompt=tuple(prompt),
        max_tokens=request.limit_tokens or min(default_max_tokens, room),
        stop_token_ids=stop_token_ids,
        dp_rank=dp_rank,
        cache_salt=request.salt or None,
        media=media,
    )
