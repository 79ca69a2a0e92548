"""The stages of a request, and to which of them a sampled stack belongs.

A sampled stack is a list of functions, the innermost first. It belongs to the stage of the first function that `STAGES`
names; modules that are not named (libraries, and what several stages use: state, heads) belong to their callers. The
longest name decides: a class before its module, a module before its package. A stack without functions is the loop's.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

LOOP, ELSE = "event loop, reads", "else"
OBSERVER = "bench.request.observed_router"
PACKAGES = ("router", "kv_protocol", "kv_runtime", "indexer")
"""The packages of this repository that a router runs."""
RUNNER = "asyncio.runners"
"""Runs the event loop: what is outside of it is the same for every stack."""
_STATE, _CLIENT = "router.decision.state", "router.http.client"
_ROUTING = "router.decision.routing"

STAGES: Mapping[str, tuple[str, ...]] = {
    "read": (_CLIENT, "router.http.plane", "router.request.endpoints"),
    "parse": (
        "router.request.reading",
        "router.request.route_request",
        "kv_protocol.openai",
        "kv_protocol.body_limits",
    ),
    "prompt": (
        "router.prompt",
        "kv_runtime.text",
        "kv_protocol.hashing",
        "indexer.native.index",
    ),
    "queue": ("router.queue",),
    "view": (f"{_STATE}:RouterState.model_view", "router.decision.view"),
    "cost and choice": ("router.decision",),
    "take": (f"{_ROUTING}:Routing.take", f"{_ROUTING}:DecisionLog"),
    "journal": ("router.journal", "router.replicas"),
    "call": ("router.request.calls", "router.request.handoff", "kv_protocol.continuation"),
    "send": ("router.http.upstreams:Upstreams", "router.http.exchange:Exchange.forward"),
    "relay": (
        "router.http.relay",
        "router.http.upstreams:WorkerConnection",
        "router.http.exchange:BufferedResponse",
        "router.http.stream_replay",
        f"{_CLIENT}:ClientConnection.finish",
    ),
    "settle": (
        f"{_ROUTING}:Lease",
        "router.attribution",
    ),
    "metrics": ("router.metrics",),
    "request": (
        "router.request.request",
        "router.request.callback_coroutine",
        "router.request.records",
        "router.request.serving",
        "router.drain.warming",
        "router.endpoint_picker",
        "router.pools",
        "router.decision.plan",
        "router.http.refusals",
        "router.request.replies",
    ),
    "log client": ("kv_runtime.event_log", "nats", "asyncio.streams"),
    "background": (
        "router.feeds.feeds",
        "router.feeds.watch",
        "router.http.plane:HttpPlane._check_timeouts",
        "router.control_plane",
        "router.drain",
        "indexer.service",
        "kv_runtime.supervise",
        "kv_runtime.telemetry",
        "kv_runtime.http",
    ),
}
"""The packages, modules, classes and functions (`module:Class.function`) that begin a stage."""

OF_CALLERS = (
    "router.prompt.chains",
    "router.decision.verdict",
    _STATE,
    f"{_ROUTING}:Routing.apply",
)
"""Modules and functions that several stages use, though their package is one stage's: they belong to their callers."""

_STAGE_OF: dict[str, str] = {name: stage for stage, names in STAGES.items() for name in names} | dict.fromkeys(
    OF_CALLERS, ""
)


class SampledStack(NamedTuple):
    """How often this stack was found, and the functions, the innermost first, up to the event loop.

    `begins`: the innermost function had not executed anything yet.
    """

    times: int
    begins: bool
    places: Sequence[str]

    @property
    def is_loop(self) -> bool:
        """Whether the event loop itself was at work: a sample of that is taken when it calls the next function."""
        return not self.places or (self.begins and len(self.places) == 1)


def named_stage(place: str) -> str | None:
    """Return the stage of `module:qualified.name`; empty or None: its caller's."""
    module, colon, name = place.partition(":")
    while colon and name:
        if (found := _STAGE_OF.get(f"{module}:{name}")) is not None:
            return found
        name = name.rpartition(".")[0]
    while module:
        if (found := _STAGE_OF.get(module)) is not None:
            return found
        module = module.rpartition(".")[0]
    return None


def stage_of(places: Iterable[str]) -> str:
    """Return the stage of a stack, the innermost function first."""
    return next((stage for place in places if (stage := named_stage(place))), ELSE)


def shares(stacks: Iterable[SampledStack]) -> dict[str, float]:
    """Return the share of each stage in the stacks, 1 in sum; empty without stacks."""
    counts: Counter[str] = Counter()
    for stack in stacks:
        counts[LOOP if stack.is_loop else stage_of(stack.places)] += stack.times
    total = counts.total()
    return {stage: count / total for stage, count in counts.items()}


def own_shares(stacks: Iterable[SampledStack]) -> dict[str, float]:
    """Return the share of each of our functions in the stacks; what a library does is its caller's."""
    counts, total = Counter[str](), 0
    for stack in stacks:
        total += stack.times
        ours = (place for place in stack.places if place.replace(":", ".").partition(".")[0] in PACKAGES)
        if not stack.is_loop and (place := next(ours, None)) is not None:
            counts[place] += stack.times
    return {place: count / total for place, count in counts.most_common()}
