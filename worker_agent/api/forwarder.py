"""Forwards requests to an attached engine to which routers do not send directly.

    direct    the router sends to the engine's own address. The default for one rank: nothing has to be rewritten. This
              process is not on the requests' path; it may be slow or restart without effect on them
    forward   the router sends to this process. The default for several data-parallel ranks: the router chooses one, but
              names it only to workers that take token ids, too. The engine knows neither `x-dp-rank` nor the ids

POST and GET are taken on any path: the router knows which are open. Bytes of an answer are passed on unparsed. If the
router disconnects, the engine's request is ended; if the engine disconnects during an answer, the router's connection
is aborted, so that a partial answer is not taken for a complete one. The engine's own errors are passed on; before its
first byte this process answers:

    400   `x-dp-rank` names no rank of the engine         413   longer than `worker.body_bytes_max`
    502   the engine cannot be reached                    503   `worker.inflight_requests_max` requests are being served
    504   its answer did not begin within `SILENCE_S`

    in the router's request                                  the engine gets
    ------------------------------------------------------   -----------------------------------------------------------
    `kv_prompt_ids`, the body's first key                    nothing: the key and its value are cut out, the rest stays
                                                             byte for byte
    `x-dp-rank`                                              the engine's header for a rank (`rank_header`), if any
    `authorization`                                          the engine's own key, or none
    other routing and hop-by-hop headers                     nothing
    everything else                                          the same

Token ids cannot be passed on: no engine's chat endpoint takes them beside messages, and in a completion they would
change `echo` and log probabilities. So the engine encodes the text itself, as for any client. TensorRT-LLM refuses
bodies with unknown keys.

Source: the router's `router/prompt/chains.py`; TensorRT-LLM `tensorrt_llm/serve/openai_protocol.py` (`extra="forbid"`).
"""

import re
from collections.abc import AsyncIterator, Iterable

import aiohttp
from aiohttp import web

from kv_protocol.openai.errors import RequestInvalid
from kv_runtime.http.access import require_token
from kv_runtime.http.answers import error_response, openai_errors
from worker_agent.api.bodies import dp_rank_of, refusal
from worker_agent.api.in_flight import HandledRequest, InFlight, WorkerTracer

CONNECT_S = 5.0
SILENCE_S = 600.0
"""Longest pause in an answer; routers have their own, shorter bounds."""
_KEEPALIVE_S = 2.0
"""How long an idle connection is kept: less than engines keep it, which is 5 s (uvicorn's `timeout_keep_alive`)."""
_PROMPT_IDS = re.compile(rb'\s*\{\s*"kv_prompt_ids"\s*:\s*"[A-Za-z0-9+/=]*"\s*(,?)')
_HOP_BY_HOP = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade",
    }
)  # fmt: skip
_ROUTERS_OWN = frozenset({"x-dp-rank", "x-worker-instance-id", "x-prefill-instance-id", "x-decision-id"})
_NOT_FORWARDED = _HOP_BY_HOP | _ROUTERS_OWN | {"host", "content-length", "authorization", "expect"}
_NOT_RETURNED = _HOP_BY_HOP | {"date", "server"}


class Forwarder:
    """Forwards to one engine while its application is served; `in_flight` counts the requests."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str,
        dp_ranks: tuple[int, ...],
        rank_header: str,
        inflight_requests_max: int,
        tracer: WorkerTracer | None = None,
    ) -> None:
        """`rank_header` empty: the engine chooses the rank. `tracer` None: requests have no spans."""
        self._base_url, self._api_key, self._dp_ranks = base_url.rstrip("/"), api_key, dp_ranks
        self._rank_header = rank_header
        self._session: aiohttp.ClientSession
        self.in_flight = InFlight(inflight_requests_max, tracer)

    def app(self, *, token: str, body_bytes_max: int) -> web.Application:
        """Return the application that serves the paths."""
        app = web.Application(middlewares=[openai_errors, require_token(token)], client_max_size=body_bytes_max)
        serve = self.in_flight.serving(self._handle)
        app.add_routes([web.post("/{path:.*}", serve), web.get("/{path:.*}", serve, allow_head=False)])
        app.cleanup_ctx.append(self._connected)
        return app

    async def _connected(self, _: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),  # bounded by inflight_requests_max
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        ) as self._session:
            yield

    async def _handle(self, http: web.Request) -> HandledRequest:
        try:
            dp_rank = dp_rank_of(http, self._dp_ranks)
        except RequestInvalid as error:
            return refusal(error), "refused"
        return await self._answered(http, without_prompt_ids(await http.read()), dp_rank)

    async def _answered(self, http: web.Request, body: bytes, dp_rank: int | None) -> HandledRequest:
        headers = engine_headers(
            http.headers.items(), rank_header=self._rank_header, dp_rank=dp_rank, api_key=self._api_key
        )
        url = f"{self._base_url}{http.raw_path}"
        request = self._session.request(http.method, url, data=body or None, headers=headers, allow_redirects=False)
        try:
            engine = await request
        except TimeoutError as error:
            return _failed(504, f"the engine did not answer: {str(error) or type(error).__name__}"), "failed"
        except (aiohttp.ClientError, OSError) as error:
            return _failed(502, f"the engine cannot be reached: {str(error) or type(error).__name__}"), "failed"
        try:
            return await self._passed_on(http, engine)
        finally:
            engine.close()  # a complete answer's connection is back in the pool; any other one ends with its request

    async def _passed_on(self, http: web.Request, engine: aiohttp.ClientResponse) -> HandledRequest:
        response = web.StreamResponse(status=engine.status, reason=engine.reason)
        for name, value in engine.headers.items():
            if name.lower() not in _NOT_RETURNED:
                response.headers.add(name, value)
        await response.prepare(http)
        parts = engine.content.iter_any()
        while True:
            try:
                part = await anext(parts, b"")
            except (aiohttp.ClientError, TimeoutError, OSError):
                if http.transport is not None:
                    http.transport.abort()
                return response, "cut"
            if not part:
                break
            await response.write(part)
        await response.write_eof()
        return response, "ok"


def _failed(status: int, message: str) -> web.Response:
    return error_response(status, message, code="engine_unreachable")


def without_prompt_ids(body: bytes) -> bytes:
    """Return `body` without the router's `kv_prompt_ids`, if that is its first key; else `body` itself."""
    found = _PROMPT_IDS.match(body)
    return body if found is None else b"{" + body[found.end() :]


def engine_headers(
    headers: Iterable[tuple[str, str]], *, rank_header: str, dp_rank: int | None, api_key: str
) -> list[tuple[str, str]]:
    """Return the headers that the engine gets; without `rank_header`, or `dp_rank`, it chooses the rank."""
    received = list(headers)
    options = [value for name, value in received if name.lower() == "connection"]
    dropped = {option.strip().lower() for value in (rank_header, *options) for option in value.split(",")}
    forwarded = [(name, value) for name, value in received if name.lower() not in _NOT_FORWARDED | dropped]
    if rank_header and dp_rank is not None:
        forwarded.append((rank_header, str(dp_rank)))
    if api_key:
        forwarded.append(("Authorization", f"Bearer {api_key}"))
    return forwarded
