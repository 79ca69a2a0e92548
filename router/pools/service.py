"""What all requests to pools share: configuration, state of pools, limits, counters."""

from collections import Counter
from collections.abc import Callable
from functools import partial

import msgspec

from router.config import RouterSettings
from router.decision.routing import Readiness
from router.http.exchange import CallLimits
from router.http.heads import HOP_BY_HOP, Headers
from router.http.limits import CONNECT_S
from router.http.upstreams import Upstreams
from router.pools.config import PoolsConfig
from router.pools.selection import PoolGroup, PoolSequence, SelectionInput, Targets, plan, select
from router.pools.watch import PoolWatch
from router.prompt.prompts import ModelPrompts
from router.request.bodies import BodyParser
from router.request.route_request import route_request

_NOT_SENT_ON = HOP_BY_HOP | {b"host", b"accept-encoding", b"content-type", b"expect", b"origin", b"x-request-id"}
"""Headers of a connection, and headers that this process writes itself."""
_OF_A_DECODE_WORKER = frozenset({b"x-worker-instance-id", b"x-dp-rank"})
"""Headers that a prefill pool does not need."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The process's names, its models, and the targets of requests that state none."""

    models: tuple[str, ...]
    namespace: str = "dynamo"
    component_name: str = "global_router"
    defaults: Targets = Targets()


class PoolService:
    """Chooses pools and routers, and holds what all requests need."""

    def __init__(
        self,
        config: PoolsConfig,
        identity: Identity,
        settings: RouterSettings,
        watch: PoolWatch,
        upstreams: Upstreams,
        prompts: ModelPrompts | None,
        new_id: Callable[[], str],
    ) -> None:
        """`prompts`: None without a tokenizer: lengths are then estimated."""
        self.config, self.identity, self.live, self.metrics = config, identity, watch.live, watch.metrics
        self.upstreams, self.prompts = upstreams, prompts
        self.bodies = BodyParser(settings.data.body_limits())
        self.route_request = partial(route_request, new_id)
        self.attempt_failed = watch.attempt_failed
        self.inflight_max = settings.queue.inflight_requests_max
        limits = settings.failures
        self._streamed = CallLimits(CONNECT_S, limits.first_byte_s, limits.between_bytes_s, limits.total_s)
        self._buffered = CallLimits(CONNECT_S, limits.whole_s, limits.between_bytes_s, limits.total_s)
        self._requests: Counter[str] = Counter()

    @property
    def reads_isl(self) -> bool:
        """Whether any grid reads the prompt's length."""
        return any(group.reads_isl for group in self.config.groups)

    def call_limits(self, *, streamed: bool) -> CallLimits:
        """Return the time limits for a router's answer."""
        return self._streamed if streamed else self._buffered

    def plans(self, selection_input: SelectionInput, *, one_token: bool) -> tuple[PoolSequence, ...]:
        """Return the pools to try now, in order, for each phase in turn; for `one_token` only the last phase."""
        groups = self.config.groups[-1:] if one_token else self.config.groups
        return tuple(self._plan(group, selection_input) for group in groups)

    def _plan(self, group: PoolGroup, selection_input: SelectionInput) -> PoolSequence:
        selection = select(group, selection_input, self.identity.defaults)
        statuses = [self.live.status(name) for name in group.namespaces]
        return plan(group, selection, statuses, retry=self.config.retry)

    def readiness(self) -> Readiness:
        """Return whether requests can be served now; `reasons` names phases without a pool that is up, and why."""
        reasons = []
        for group in self.config.groups:
            statuses = [self.live.status(name) for name in group.namespaces]
            if all(each.fitness == "down" for each in statuses):
                unfit = (f"{each.namespace}: {'; '.join(each.reasons)}" for each in statuses)
                reasons.append(f"no {group.phase} pool is up: {' | '.join(unfit)}")
        return Readiness(not reasons, reasons, [])

    def routers(self, namespace: str) -> tuple[str, ...]:
        """Return a pool's routers that are up, all if none is; each comes first in its turn."""
        urls = self.live.status(namespace).routers_up
        if not urls:
            urls = tuple(each.url for each in self.config.pools[namespace].routers)
        self._requests[namespace] += 1
        first = self._requests[namespace] % len(urls)
        return urls[first:] + urls[:first]


def sent_on(headers: Headers, request_id: str, *, to_prefill: bool = False) -> bytes:
    """Return the header lines of a call to a router: the client's, except those of its connection."""
    left_out = _NOT_SENT_ON | _OF_A_DECODE_WORKER if to_prefill else _NOT_SENT_ON
    lines = b"".join(b"%b: %b\r\n" % (name, value) for name, value in headers.items() if name not in left_out)
    return b"content-type: application/json\r\nx-request-id: %b\r\n%b" % (request_id.encode(), lines)
