"""The modes, and what each reads.

    mode             chooses                                                             reads
    kv               the lowest cost in ms; with a temperature, by a draw                  overlap, load, rates
    predicted-ttft   the smallest predicted time to the first token among those that       overlap, load, rates
                     meet the targets; of decode workers, the least time between tokens
    round-robin      the candidates in turn                                                nothing
    random           any, by the seed                                                      nothing
    power-of-two     of two that the seed draws, the one with fewer active requests        load
    least-loaded     the fewest active requests, ties by the seed                          load
    direct           the worker named by the client; its ranks in turn                     nothing

A mode that reads no overlap asks no index, and its prompts need not be encoded. Targets are the request's, else the
policy's. If no candidate meets them, the choice is among all, and `policy.unmet` says whether it is carried out.

An embedding reuses no KV prefix: for its requests `least-loaded` takes the place of a mode that reads overlap.

The core implements these modes (`router/native/choice.cpp`). A user's mode is a pure `ModeFunction`, imported by
`router/decision/policy_config.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from kv_protocol.decided import RequestPhase, RouteRequest
from kv_protocol.openai.endpoints import PROMPT_ENDPOINTS
from router.decision.policy import Policy
from router.decision.view import View
from router.native import built


class Candidates(NamedTuple):
    """The ranks that may take the request; at least one."""

    columns: View
    rank_indices: Sequence[int]
    """The indices of the candidates among all ranks that serve the model, ascending."""


class Choice(NamedTuple):
    """What a user's mode chooses: the winner, and if it compares, the next best, by their indices among the candidates.

    `margin` is how much more the next best costs; `costs` has each candidate's, in the mode's own unit.
    """

    winner: int
    reason: str
    runner_up: int | None = None
    margin: float | None = None
    costs: Sequence[float] = ()
    meets_targets: bool = True


ModeFunction = Callable[[Candidates, RouteRequest, Policy, int], Choice | int]
"""Returns a `Choice`, or the index of a candidate."""


class Mode(NamedTuple):
    """The columns of a view that a mode reads (the others may be blank), and a user's function."""

    choose: ModeFunction | None = None
    """None: the core chooses."""
    reads_overlap: bool = False
    reads_load: bool = False
    reads_rates: bool = False


MODES: dict[str, Mode] = {
    "kv": Mode(reads_overlap=True, reads_load=True, reads_rates=True),
    "predicted-ttft": Mode(reads_overlap=True, reads_load=True, reads_rates=True),
    "round-robin": Mode(),
    "random": Mode(),
    "power-of-two": Mode(reads_load=True),
    "least-loaded": Mode(reads_load=True),
    "direct": Mode(),
}


class Rule(NamedTuple):
    """The policy that chooses a worker for some requests, its mode, and both as the core reads them."""

    policy: Policy
    mode: Mode
    native: Any


def rule_of(modes: Mapping[str, Mode], policy: Policy, phase: RequestPhase, endpoint: str) -> Rule:
    """Return the rule of requests for this phase and endpoint. `modes` are all that a policy can name."""
    policy = policy.of(phase)
    if endpoint not in PROMPT_ENDPOINTS and modes[policy.mode].reads_overlap:
        policy = replace(policy, mode="least-loaded")
    mode = modes[policy.mode]
    name = policy.mode if mode.choose is None else "user"
    return Rule(policy, mode, built.policy(policy, name, mode.reads_overlap, mode.reads_load, mode.reads_rates))
