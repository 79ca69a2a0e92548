"""Rewrites a router's request for an engine without support for the router's extensions.

    in the router's request                                  the engine gets
    ------------------------------------------------------   -----------------------------------------------------------
    `kv_prompt_ids`, the body's first key                    nothing: the key and its value are cut out, the rest stays
                                                             byte for byte
    `x-dp-rank`                                              `X-data-parallel-rank` (vLLM, SGLang)
    `authorization`                                          the engine's own key, or none
    other routing and hop-by-hop headers                     nothing
    everything else                                          the same

Token ids cannot be passed on: no engine's chat endpoint takes them beside messages, and in a completion they would
change `echo` and log probabilities. So the engine encodes the text itself, as for any client. TensorRT-LLM refuses
bodies with unknown keys.

Source: the router's `router/prompt/chains.py`; for the header vLLM `vllm/entrypoints/openai/engine/serving.py` and
SGLang `python/sglang/srt/entrypoints/openai/serving_base.py`; TensorRT-LLM `tensorrt_llm/serve/openai_protocol.py`
(`extra="forbid"`).
"""

import re
from collections.abc import Iterable

RANK_HEADER = "X-data-parallel-rank"
ROUTER_RANK_HEADER = "x-dp-rank"

_PROMPT_IDS = re.compile(rb'\s*\{\s*"kv_prompt_ids"\s*:\s*"[A-Za-z0-9+/=]*"\s*(,?)')
_HOP_BY_HOP = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade",
    }
)  # fmt: skip
_ROUTERS_OWN = frozenset({"x-dp-rank", "x-worker-instance-id", "x-prefill-instance-id", "x-decision-id"})
_NOT_FORWARDED = _HOP_BY_HOP | _ROUTERS_OWN | {"host", "content-length", "authorization", RANK_HEADER.lower(), "expect"}
_NOT_RETURNED = _HOP_BY_HOP | {"date", "server"}


def without_prompt_ids(body: bytes) -> bytes:
    """Return `body` without the router's `kv_prompt_ids`, if that is its first key; else `body` itself."""
    found = _PROMPT_IDS.match(body)
    if found is None:
        return body
    return b"{" + body[found.end() :]


def engine_headers(headers: Iterable[tuple[str, str]], *, dp_rank: int | None, api_key: str) -> list[tuple[str, str]]:
    """Return the headers that the engine gets, names and values; `dp_rank` None: the engine chooses the rank."""
    received = list(headers)
    options = [value for name, value in received if name.lower() == "connection"]
    dropped = _NOT_FORWARDED | {option.strip().lower() for value in options for option in value.split(",")}
    forwarded = [(name, value) for name, value in received if name.lower() not in dropped]
    if dp_rank is not None:
        forwarded.append((RANK_HEADER, str(dp_rank)))
    if api_key:
        forwarded.append(("Authorization", f"Bearer {api_key}"))
    return forwarded


def response_headers(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the headers of the router's response, without those of the engine's connection."""
    return [(name, value) for name, value in headers if name.lower() not in _NOT_RETURNED]
