"""The policies that the bench compares, by name.

kv                  mode kv as it is by default
kv-blocks           mode kv-blocks as it is by default
predicted-ttft, least-loaded, power-of-two, round-robin        our other modes; the last three are other routers' too
dynamo              NVIDIA Dynamo's rule (its documentation of 1.6): blocks to prefill at the weight 1, and active
                    decode blocks; our tie-breaks
sglang, session-hash, llm-d                                    rules of their own: see the modules of this folder
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bench.placement.llmd import EngineMetrics, WeightedScorers
from bench.placement.session_hash import SessionHash
from bench.placement.sglang import CacheAware
from bench.routing.virtual_engine import VirtualEngine
from bench.routing.virtual_fleet import ModesOf
from router.decision.policies import MODES, Mode
from router.decision.policy import CostParameters, Policy


class Placement(NamedTuple):
    """How requests are placed: a policy, and the modes that it can name, made for a fleet's engines."""

    policy: Policy
    modes_of: ModesOf = lambda _: MODES


def _foreign(mode: str, modes_of: ModesOf) -> Placement:
    """A rule that has neither our spill gate, nor our newcomers, nor our predictions."""
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


PLACEMENTS: dict[str, Placement] = {
    "kv": Placement(Policy.current()),
    "kv-blocks": Placement(Policy(mode="kv-blocks")),
    **{
        mode: Placement(Policy(mode=mode)) for mode in ("predicted-ttft", "least-loaded", "power-of-two", "round-robin")
    },
    "dynamo": Placement(
        Policy(
            mode="kv-blocks",
            parameters=CostParameters(prefill_scale=1.0, history_weight=0.0),
            predict_on_route=False,
            spill_tokens=0,
            newcomers=False,
        )
    ),
    "sglang": _foreign("sglang", _cache_aware),
    "session-hash": _foreign("session-hash", _session_hash),
    "llm-d": _foreign("llm-d", _scorers),
}
