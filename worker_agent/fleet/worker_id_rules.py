"""Which instance keeps a worker id: by its newest fleet event, the order of claims, and heartbeats.

An instance *claims* the id with its first registration, whose sequence in `KV_FLEET` is the claim; later events of the
instance carry it (`Kv-Claim`). The lower claim is the earlier one. An instance that leaves gives up its claim.
Another instance is *alive* while its heartbeats come, *silent* after `SILENT_S` without one, *unknown* before that.

| newest event of the id | of | claim | liveness | this instance |
|---|---|---|---|---|
| none: purged, or a new stream | | | | registers |
| refused: unreadable, or not signed | | | | registers |
| its own registration, whatever `ends_drain` and `drained` say | itself | | | keeps |
| another registration of its instance, at its address | itself | | | registers: it has changed |
| one at another address: forged | itself | | | leaves and registers |
| draining by hand | itself | | | keeps: the control plane drains it |
| draining otherwise: forged | itself | | | leaves and registers |
| left, `removed by hand` | itself | | | keeps: it stays out |
| left otherwise: forged | itself | | | registers |
| left | another | | | registers |
| registered, draining | another | later | | registers |
| registered, draining | another | earlier | alive | stops, or does not start |
| registered, draining | another | earlier | silent | registers: it takes the id over |
| registered, draining | another | earlier | unknown | waits |

An instance without a claim is later than all others. Of two living instances exactly one is earlier, so that one stops
and the other keeps the id, whatever the order of their messages.
"""

from typing import Literal, NamedTuple

from msgspec.structs import replace

from kv_protocol.fleet import (
    HEARTBEAT_PERIOD_S,
    MISSED_HEARTBEATS_MAX,
    REMOVED_BY_HAND,
    FleetEvent,
    WorkerDraining,
    WorkerLeft,
    WorkerRegistered,
)

SILENT_S = HEARTBEAT_PERIOD_S * MISSED_HEARTBEATS_MAX
"""An instance without a heartbeat for this long is silent."""
NO_CLAIM = 1 << 63
"""Later than every sequence of a stream."""

Liveness = Literal["alive", "silent", "unknown"]
Action = Literal["keep", "register", "replace", "wait", "stop"]


class NewestMessage(NamedTuple):
    """The newest message of a subject of the id. `event` is None if it was `refused`; `claim` is its instance's."""

    event: FleetEvent | None
    claim: int = 0
    subject: str = ""
    seq: int = 0
    refused: str = ""


def action(newest: NewestMessage | None, own: WorkerRegistered, own_claim: int, liveness: Liveness) -> Action:
    """Return the action of the instance that registers `own`, given the other instance's `liveness`."""
    event = None if newest is None else newest.event
    if newest is None or event is None:
        return "register"
    if event.instance == own.instance:
        return _action_on_own(event, own)
    return action_on_another(event, newest.claim, own.instance, own_claim, liveness)


def action_on_another(event: FleetEvent, claim: int, instance: str, own_claim: int, liveness: Liveness) -> Action:
    """Return the action of `instance` if the newest event of the id is another instance's."""
    if isinstance(event, WorkerLeft) or (own_claim, instance) < (claim, event.instance):
        return "register"
    if liveness == "alive":
        return "stop"
    return "register" if liveness == "silent" else "wait"


def _action_on_own(event: FleetEvent, own: WorkerRegistered) -> Action:
    if isinstance(event, WorkerLeft):
        return "keep" if event.reason == REMOVED_BY_HAND else "register"
    if isinstance(event, WorkerDraining):
        return "keep" if event.by_hand else "replace"
    is_own = replace(event, ends_drain=own.ends_drain, drained=own.drained) == own
    if is_own:
        return "keep"
    return "register" if event.base_url == own.base_url else "replace"


def drained_by_hand(event: FleetEvent | None, *, before: bool) -> bool:
    """Return whether an operator drains this instance, by its own newest event.

    `before`: the result before that event.
    """
    match event:
        case WorkerDraining(by_hand=True):
            return True
        case WorkerRegistered(ends_drain=True):
            return False
        case WorkerRegistered(drained=True):
            return True
        case _:
            return before


def liveness(silence_s: float | None, listened_s: float, *, has_ended: bool) -> Liveness:
    """Return the liveness of an instance.

    Args:
        silence_s: seconds since its newest heartbeat; None: none came.
        listened_s: for how many seconds its heartbeats would have been received.
        has_ended: whether its own address refuses connections: then there is no wait.
    """
    if silence_s is not None and silence_s < SILENT_S:
        return "alive"
    return "silent" if has_ended or listened_s >= SILENT_S else "unknown"
