"""The OpenAI endpoints that a worker can serve, by name.

    name           path                     serves it
    -----------    --------------------     ------------------------------------------------------
    chat           /v1/chat/completions     every worker that states no endpoints
    completions    /v1/completions          likewise
    responses      /v1/responses            a worker that states it
    embeddings     /v1/embeddings           a worker that states it

A registration may state other names: a router passes over names that it does not know.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from kv_protocol.errors import LimitExceeded

ApiEndpoint = Literal["chat", "completions", "responses", "embeddings"]
API_ENDPOINTS: tuple[ApiEndpoint, ...] = get_args(ApiEndpoint)
DEFAULT_ENDPOINTS: tuple[str, ...] = ("chat", "completions")
"""What a worker serves that states no endpoints."""
PATHS: Mapping[ApiEndpoint, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "embeddings": "/v1/embeddings",
}
_NAMES_MAX = 16
_NAME_CHARACTERS_MAX = 64


def check_stated(names: tuple[str, ...]) -> None:
    """Return when a registration may state these names; raise `LimitExceeded` otherwise."""
    if len(names) > _NAMES_MAX or not all(0 < len(name) <= _NAME_CHARACTERS_MAX for name in names):
        allowed = f"up to {_NAMES_MAX} names of 1..{_NAME_CHARACTERS_MAX} characters"
        raise LimitExceeded("api_endpoints", names, allowed)


def serves_default(names: tuple[str, ...]) -> bool:
    """Return whether a worker that states these names serves both chat and completions."""
    return names == DEFAULT_ENDPOINTS or all(name in names for name in DEFAULT_ENDPOINTS)


def stated_words(names: Iterable[str]) -> str:
    """Return the stated names as a message shows them."""
    return ", ".join(names) or "none"
