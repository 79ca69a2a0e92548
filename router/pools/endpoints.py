"""The data plane's endpoints of `router pools`, beside those of every process (`router/request/replies.py`).

POST /v1/chat/completions, /v1/completions    served by pools (`served.py`)
POST /v1/pools/select                         which pools such a request would be for now, and why: nothing is forwarded

`/v1/models` names what pools serve; `/ready` is 503 while a phase has no pool that is up.
"""

from router.http import refusals
from router.http.exchange import Exchange
from router.pools.served import PoolAttempt, Pools
from router.pools.service import PoolService
from router.request.replies import Replies, answer, refusal_of, refuse
from router.request.request import Request


def pool_endpoints(service: PoolService) -> Replies:
    """Return the data plane's service."""

    def serve(exchange: Exchange) -> None:
        metrics, most = service.metrics, service.inflight_max
        if metrics.inflight >= most:
            message = f"queue.inflight_requests_max: {most} requests are being served; try again"
            refuse(exchange, refusals.unavailable(message, "overloaded"))
        else:
            metrics.began()
            Request(exchange, Pools(service)).begin()

    def explain(exchange: Exchange) -> None:
        pools = Pools(service)
        request = Request(exchange, pools)
        request.explain(_explain(request, pools))

    posts = {"/v1/chat/completions": serve, "/v1/completions": serve, "/v1/pools/select": explain}
    return Replies(posts, lambda: service.identity.models, service.readiness)


async def _explain(request: Request[PoolAttempt], pools: Pools) -> None:
    """Answer with the pools that the request would be sent to, and why."""
    try:
        await request.read()
    except Exception as error:  # noqa: BLE001 - the edge: whatever it was, the client gets an answer
        refuse(request.exchange, refusal_of(error, request))
    else:
        answer(request.exchange, pools.selected())
