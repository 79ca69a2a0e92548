"""Makes the `RouteRequest` of a parsed body and its headers.

| header | means | without it, in the body |
|---|---|---|
| `x-request-id` | the client's name for the request, up to 128 printable characters | a new one |
| `x-worker-instance-id` | the only worker | `nvext.backend_instance_id`, `nvext.decode_worker_id` |
| `x-dp-rank` | the only rank | `nvext.dp_rank` |
| `x-session-id` | a session: each request prefers the rank of the one before; not for embeddings | |
| `x-required-taints` | names, separated by commas: only workers that carry all of them | |
| `x-preferred-taints` | `name=weight`, ...: a worker with the name costs less, or more if the weight is below 0 | |
| `x-request-priority` | a whole number: higher ones leave the queue sooner | `nvext.agent_hints.priority`, `priority` |
| `x-request-strict-priority` | a whole number: requests with a lower one wait | `nvext.agent_hints.strict_priority` |

An invalid header is an error that names it; an invalid `x-request-id` is replaced. Source: `docs/SOURCES.md` D1.5, D7.
"""

import math
import re
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from kv_protocol.decided import RouteRequest
from kv_protocol.hashing import Hashing
from kv_protocol.ids import DP_RANK_MAX
from kv_protocol.openai.endpoints import PROMPT_ENDPOINTS
from kv_protocol.openai.requests import Inbound, RequestInvalid
from router.http.heads import Headers

TAINTS_MAX = 16
_NAME_CHARACTERS_MAX = 128
_WEIGHT_MAX = 1e6
WISHING_HEADERS = frozenset(
    {
        b"x-worker-instance-id", b"x-dp-rank", b"x-session-id", b"x-required-taints", b"x-preferred-taints",
        b"x-request-priority", b"x-request-strict-priority",
    }
)  # fmt: skip
"""Headers that, like `nvext`, state a request's wishes: most requests have none."""
_INTEGER = re.compile(r"-?[0-9]{1,9}")


def plain_route(inbound: Inbound, hashing: Hashing) -> RouteRequest:
    """Return the routing fields that requests without wishes share: ids, prompts and limits are left out."""
    return RouteRequest(
        decision_id="",
        request_id="",
        model=inbound.model,
        isl_tokens=0,
        block_size=hashing.block_size,
        hash_scheme=hashing.scheme,
        endpoint=inbound.endpoint,
    )


def route_request(new_id: Callable[[], str], inbound: Inbound, headers: Headers, hashing: Hashing) -> RouteRequest:
    """Return the routing fields of a request whose prompt is not read.

    `new_id` returns unique names. Raises `RequestInvalid`: a header has an invalid value.
    """
    return replace(
        plain_route(inbound, hashing),
        decision_id=new_id(),
        request_id=name_in(headers, b"x-request-id") or new_id(),
        max_tokens=inbound.limit_tokens or 0,
        **wishes(inbound, headers),
    )


def wishes(inbound: Inbound, headers: Headers) -> dict[str, Any]:
    """Return the fields that state a request's wishes; raise `RequestInvalid`: a header has an invalid value."""
    is_plain = inbound.nvext is None and inbound.extra_args is None and inbound.priority is None
    if is_plain and WISHING_HEADERS.isdisjoint(headers):
        return {}
    hints = inbound.extension.hints
    return {
        "session_id": _session(headers) if inbound.endpoint in PROMPT_ENDPOINTS else "",
        "priority": _integer(headers, b"x-request-priority", _first(hints.priority, int(inbound.priority or 0))),
        "strict_priority": _integer(headers, b"x-request-strict-priority", hints.strict_priority or 0),
        "expected_osl": hints.osl or 0,
        "required_taints": _names(headers, b"x-required-taints"),
        "preferred_taints": tuple(map(_weighed, _names(headers, b"x-preferred-taints"))),
        "ttft_target_s": inbound.targets.ttft_target_s,
        "itl_target_s": inbound.targets.itl_target_s,
        "pinned_worker": _pinned_worker(inbound, headers),
        "pinned_dp_rank": _pinned_dp_rank(inbound, headers),
    }


def _first(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def name_in(headers: Headers, header: bytes) -> str:
    """Return a printable name; empty if the header is missing or not printable."""
    value = headers.get(header, b"").decode("utf-8", "surrogateescape")
    return value if len(value) <= _NAME_CHARACTERS_MAX and value.isprintable() else ""


def _session(headers: Headers) -> str:
    session, found = name_in(headers, b"x-session-id"), headers.get(b"x-session-id")
    if found and not session:
        shown = found[:_NAME_CHARACTERS_MAX].decode("utf-8", "replace")
        raise RequestInvalid("x-session-id", shown, f"1..{_NAME_CHARACTERS_MAX} printable characters")
    return session


def _names(headers: Headers, header: bytes) -> tuple[str, ...]:
    raw = headers.get(header)
    if raw is None:
        return ()
    names = tuple(each.strip() for each in raw.decode("utf-8", "replace").split(",") if each.strip())
    if len(names) > TAINTS_MAX or any(len(name) > _NAME_CHARACTERS_MAX for name in names):
        found = f"{len(names)} names, the longest of {max(map(len, names))} characters"
        raise RequestInvalid(header.decode(), found, f"{TAINTS_MAX} names of {_NAME_CHARACTERS_MAX} characters at most")
    return names


def _weighed(pair: str) -> tuple[str, float]:
    name, _, weight = pair.partition("=")
    try:
        number = float(weight)
    except ValueError:
        number = math.nan
    if not name or not abs(number) <= _WEIGHT_MAX:
        raise RequestInvalid("x-preferred-taints", pair, "name=weight, a number")
    return name.strip(), number


def _integer(headers: Headers, header: bytes, otherwise: int) -> int:
    raw = headers.get(header)
    if raw is None:
        return otherwise
    value = raw.decode("utf-8", "replace")
    if not _INTEGER.fullmatch(value):
        raise RequestInvalid(header.decode(), value, "a whole number of up to 9 digits")
    return int(value)


def _pinned_worker(inbound: Inbound, headers: Headers) -> str | None:
    raw = headers.get(b"x-worker-instance-id")
    if raw:
        return raw.decode("utf-8", "replace")
    extension = inbound.extension
    named = extension.backend_instance_id if extension.backend_instance_id is not None else extension.decode_worker_id
    return None if named is None else str(named)


def _pinned_dp_rank(inbound: Inbound, headers: Headers) -> int | None:
    dp_rank = _integer(headers, b"x-dp-rank", _first(inbound.extension.dp_rank, -1))
    if b"x-dp-rank" in headers and not 0 <= dp_rank <= DP_RANK_MAX:
        raise RequestInvalid("x-dp-rank", dp_rank, f"0..{DP_RANK_MAX}")
    return None if dp_rank < 0 else dp_rank
