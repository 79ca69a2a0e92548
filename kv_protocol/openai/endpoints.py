"""The endpoints that a worker can serve: OpenAI's by name, others of engines by their path.

    name           path                     serves it
    -----------    --------------------     ------------------------------------------------------
    chat           /v1/chat/completions     a worker that states it, or no endpoints
    completions    /v1/completions          a worker that states it, or no endpoints
    responses      /v1/responses            a worker that states it
    embeddings     /v1/embeddings           a worker that states it
    a path         that path                a worker that states it; a request to it is passed on as it is

A registration may state other names: a router passes over names that it does not know.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

from kv_protocol.errors import LimitExceeded

ApiEndpoint = Literal["chat", "completions", "responses", "embeddings"]
DEFAULT_ENDPOINTS: tuple[str, ...] = ("chat", "completions")
"""What a worker serves if it states no endpoints."""
PATHS: Mapping[ApiEndpoint, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "embeddings": "/v1/embeddings",
}
PROMPT_ENDPOINTS = frozenset({"chat", "completions", "responses", "/v1/messages"})
"""Endpoints whose requests are routed by their prompts; all others are routed by load."""
ENGINE_PATHS = ("/tokenize", "/detokenize", "/pooling", "/rerank", "/v2/rerank", "/score", "/classify")
"""Paths of engines outside of /v1/ that clients use. Source: vllm-project/vllm,
`vllm/entrypoints/openai/api_server.py`; sgl-project/sglang, `python/sglang/srt/entrypoints/http_server.py`."""
CLOSED_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Paths below /v1/ that change an engine; a router never passes them on."""
_NAMES_MAX = 64
_NAME_CHARACTERS_MAX = 64
_SHOWN_MAX = 8


def stated_paths(paths: Iterable[str]) -> tuple[str, ...]:
    """Return an engine's paths as a registration states them; if there are too many, first those that clients use."""
    own = (*PATHS.values(), "/v1/models")
    fit = [path for path in paths if path not in own and "{" not in path and len(path) <= _NAME_CHARACTERS_MAX]
    fit.sort(key=lambda path: (not path.startswith("/v1/") and path not in ENGINE_PATHS, path))
    return tuple(fit[: _NAMES_MAX - len(PATHS)])


def check_stated(names: tuple[str, ...]) -> None:
    """Raise `LimitExceeded` unless a registration may state these names."""
    if len(names) > _NAMES_MAX or not all(0 < len(name) <= _NAME_CHARACTERS_MAX for name in names):
        allowed = f"up to {_NAMES_MAX} names of 1..{_NAME_CHARACTERS_MAX} characters"
        raise LimitExceeded("api_endpoints", names, allowed)


def serves_default(names: tuple[str, ...]) -> bool:
    """Return whether a worker that states these names serves both chat and completions."""
    return names == DEFAULT_ENDPOINTS or all(name in names for name in DEFAULT_ENDPOINTS)


def stated_words(names: Iterable[str]) -> str:
    """Return the stated names as a message shows them: only some if there are many."""
    shown = sorted(names, key=lambda name: (name.startswith("/"), name))
    more = [f"{len(shown) - _SHOWN_MAX} more"] if len(shown) > _SHOWN_MAX else []
    return ", ".join([*shown[:_SHOWN_MAX], *more]) or "none"
