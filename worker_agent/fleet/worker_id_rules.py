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
| a registration of its instance at another address: forged | itself | | | leaves and registers |
| draining by hand | itself | | | keeps: the control plane drains it |
| draining otherwise: forged | itself | | | leaves and registers |
| left, `removed by hand` | itself | | | keeps: it stays out |
| left otherwise: forged | itself | | | registers |
| left | another | | | registers |
| registered or draining | another | later | | registers |
| registered or draining | another | earlier | alive | stops, or does not start |
| registered or draining | another | earlier | silent | registers: it takes the id over |
| registered or draining | another | earlier | unknown | waits |

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
"""The claim of an instance without one: later than every sequence of a stream."""

Liveness = Literal["alive", "silent", "unknown"]
Action = Literal["keep", "register", "replace", "wait", "stop"]


class NewestMessage(NamedTuple):
    """The newest message of a subject of the id. `event` is None if it was `refused`; `claim` is its instance's."""

    event: FleetEvent | None
    claim: int = 0
    subject: str = ""
    seq: int = 0
    refused: str = ""


def action(
    newest: NewestMessage, instance: str, own: WorkerRegistered | None, own_claim: int, liveness: Liveness
) -> Action:
    """Return the action of `instance`, given the `liveness` of the newest event's instance.

    `own` is what this instance registers on the message's subject; None: nothing.
    """
    event = newest.event
    if event is None or event.instance == instance:
        return "keep" if own is None else _action_on_own(event, own)
    if isinstance(event, WorkerLeft) or (own_claim, instance) < (newest.claim, event.instance):
        return "register"
    if liveness == "alive":
        return "stop"
    return "register" if liveness == "silent" else "wait"


def _action_on_own(event: FleetEvent | None, own: WorkerRegistered) -> Action:
    if event is None:
        return "register"
    if isinstance(event, WorkerLeft):
        return "keep" if event.reason == REMOVED_BY_HAND else "register"
    if isinstance(event, WorkerDraining):
        return "keep" if event.by_hand else "replace"
    is_own = replace(event, ends_drain=own.ends_drain, drained=own.drained) == own
    if is_own:
        return "keep"
    return "register" if event.base_url == own.base_url else "replace"


def drained_by_hand(event: FleetEvent, *, before: bool) -> bool:
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
