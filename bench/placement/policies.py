"""The policies that the bench compares, by name.

kv                  mode kv as it is by default
kv-fcfs, kv-wspt    the same behind our queue
predicted-ttft, least-loaded, power-of-two, round-robin        our other modes; the last three are other routers' too
dynamo              NVIDIA Dynamo's rule: see `rules.py`
dynamo-fcfs, dynamo-wspt                                       the same behind its queue
sglang, session-hash, llm-d                                    rules of their own: see the modules of this folder

Dynamo's queue (`--router-queue-threshold`, `--router-queue-policy`; off by default, as ours): a request waits while
others do, or while every worker has more than threshold x max_num_batched_tokens of uncached prompts before their
first token. When a first token comes or a request ends, requests are placed until that is so again, among all
workers. fcfs: in the order of arrival; wspt: the fewest tokens first that no worker held when the request came. Our
queue with one tenant has the same rule (`router/queue/waiting.py`). The threshold here is 1, one batch a worker.
Not theirs: what workers hold is read anew when a request is placed, there only if it has waited for 10 s. Source:
ai-dynamo 1.6.1, help texts of the flags (`dynamo/common/configuration/groups/kv_router_args.py`, which allows no
lcfs); ai-dynamo/dynamo, `lib/kv-router/src/scheduling/queue.rs` at 00067c3 and
`docs/components/router/router-configuration.md` at 057096c.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bench.placement.rules import CacheAware, EngineMetrics, SessionHash, WeightedScorers, fewest_blocks
from bench.routing.virtual_engine import VirtualEngine
from bench.routing.virtual_fleet import ModesOf
from bench.routing.virtual_router import NO_QUEUE, VirtualQueue
from router.decision.policies import MODES, Mode
from router.decision.policy import Policy


class Placement(NamedTuple):
    """How requests are placed: a policy, the modes that it can name, made for a fleet's engines, and a queue."""

    policy: Policy
    modes_of: ModesOf = lambda _: MODES
    queue: VirtualQueue = NO_QUEUE


def _foreign(mode: str, modes_of: ModesOf) -> Placement:
    """A rule that has neither our newcomers nor our predictions."""
    return Placement(Policy(mode=mode, newcomers=False, predict_on_route=False), modes_of)


def _cache_aware(_engines: Sequence[VirtualEngine]) -> Mapping[str, Mode]:
    return {"sglang": Mode(CacheAware().choose, reads_overlap=True, reads_load=True)}


def _session_hash(_engines: Sequence[VirtualEngine]) -> Mapping[str, Mode]:
    return {"session-hash": Mode(SessionHash().choose)}


def _scorers(engines: Sequence[VirtualEngine]) -> Mapping[str, Mode]:
    scorers = WeightedScorers(lambda: [metrics_of(engine) for engine in engines])
    return {"llm-d": Mode(scorers.choose, reads_overlap=True)}


def metrics_of(engine: VirtualEngine) -> EngineMetrics:
    """Return what the engine reports now."""
    used = engine.simulator.pool_statistics().used_blocks
    return EngineMetrics(engine.waiting_requests, used / engine.simulator.description.total_kv_blocks)


_KV = Placement(Policy())
_DYNAMO = _foreign("dynamo", lambda _: {"dynamo": Mode(fewest_blocks, reads_overlap=True, reads_load=True)})

PLACEMENTS: dict[str, Placement] = {
    "kv": _KV,
    "kv-fcfs": _KV._replace(queue=VirtualQueue(1.0, "fcfs")),
    "kv-wspt": _KV._replace(queue=VirtualQueue(1.0, "wspt")),
    **{
        mode: Placement(Policy(mode=mode)) for mode in ("predicted-ttft", "least-loaded", "power-of-two", "round-robin")
    },
    "dynamo": _DYNAMO,
    "dynamo-fcfs": _DYNAMO._replace(queue=VirtualQueue(1.0, "fcfs")),
    "dynamo-wspt": _DYNAMO._replace(queue=VirtualQueue(1.0, "wspt")),
    "sglang": _foreign("sglang", _cache_aware),
    "session-hash": _foreign("session-hash", _session_hash),
    "llm-d": _foreign("llm-d", _scorers),
}
