"""The checks of fleet events that every reader makes before it applies one.

| refused as | when |
|---|---|
| unreadable | the bytes are not a fleet event |
| subject | the worker id or the model does not fit the subject, or the instance registered under another subject |
| signature | the reader has keys, and none of them signed these bytes for this subject |
| replayed | the reader has keys, and the event was signed before the newest accepted event of this worker |
| base_url | the instance is registered at another address: an address changes only together with the instance |

The header `Kv-Claim` of an agent's event is the place in the stream of its instance's first registration, which has
no such header itself. A signature is the header `Kv-Signature: v1 <time_ns> <mac>`; `mac` is HMAC-SHA256 in hex over

    "kv-router fleet event v1" LF subject LF time_ns LF the value of Kv-Claim, if any LF message bytes

The subject names model and worker, the bytes name worker and instance. `time_ns` grows with every event of a worker,
independent of the signers' clocks: each signs with a later time than that of the newest event that it accepted.
Source: RFC 2104; `docs/SECURITY.md`.
"""

import hashlib
import hmac
import re
from collections.abc import Mapping
from typing import Literal, get_args

import msgspec

from kv_protocol import subjects
from kv_protocol.errors import MalformedMessage, ProtocolError
from kv_protocol.fleet import FleetEvent, WorkerLeft, WorkerRegistered, decode_fleet_event

SIGNATURE_HEADER = "Kv-Signature"
CLAIM_HEADER = "Kv-Claim"
WORKERS_MAX = 16_384
"""A gate remembers this many workers; for a further one it forgets the one without an event for the longest time."""

RefusalReason = Literal["unreadable", "subject", "signature", "replayed", "base_url"]
REFUSAL_REASONS: tuple[RefusalReason, ...] = get_args(RefusalReason)

_CONTEXT = b"kv-router fleet event v1"
_CLAIM = re.compile(r"[1-9][0-9]{0,17}")
_SIGNATURE = re.compile(r"v1 (0|[1-9][0-9]{0,18}) ([0-9a-f]{64})")


class FleetEventRefused(ProtocolError):
    """A refused fleet event; `reason` is the row of the table."""

    def __init__(self, reason: RefusalReason, message: str) -> None:
        super().__init__(message)
        self.reason: RefusalReason = reason


class _KnownWorker(msgspec.Struct, frozen=True):
    """A worker's newest registration, and when its newest event was signed; `instance` is empty once it left."""

    subject: str
    instance: str
    base_url: str
    time_ns: int


_UNKNOWN = _KnownWorker("", "", "", 0)


class FleetGate:
    """One reader's checks. `keys`: secrets shared by the fleet; the first signs, each verifies; none: no signatures."""

    def __init__(self, keys: tuple[bytes, ...] = ()) -> None:
        self._keys = keys
        self._known: dict[str, _KnownWorker] = {}
        self.refused_total: dict[RefusalReason, int] = dict.fromkeys(REFUSAL_REASONS, 0)

    def admit(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> FleetEvent:
        """Accept an event and return it.

        Raises:
            FleetEventRefused: the event is refused; only `refused_total` changed.
        """
        try:
            event, time_ns = self._checked(subject, data, headers)
        except FleetEventRefused as error:
            self.refused_total[error.reason] += 1
            raise
        self._remember(subject, event, time_ns)
        return event

    def _checked(self, subject: str, data: bytes, headers: Mapping[str, str] | None) -> tuple[FleetEvent, int]:
        try:
            event = decode_fleet_event(data)
        except MalformedMessage as error:
            raise FleetEventRefused("unreadable", str(error)) from error
        time_ns = self._verified_time_ns(subject, data, headers) if self._keys else 0
        newest_ns = self._known.get(event.worker_id, _UNKNOWN).time_ns
        if time_ns < newest_ns:
            message = f"signed at {time_ns}, allowed {newest_ns} or later"
            raise FleetEventRefused("replayed", f"worker {event.worker_id}: {message}")
        self.check(subject, event)
        return event, time_ns

    def _verified_time_ns(self, subject: str, data: bytes, headers: Mapping[str, str] | None) -> int:
        found = _SIGNATURE.fullmatch((headers or {}).get(SIGNATURE_HEADER, ""))
        if found is None:
            raise FleetEventRefused(
                "signature", f"{SIGNATURE_HEADER}: found none that is well formed, allowed one by a key of the fleet"
            )
        claim = (headers or {}).get(CLAIM_HEADER, "")
        macs = [_mac(key, subject, data, found[1], claim) for key in self._keys]
        if not sum(hmac.compare_digest(mac, found[2]) for mac in macs):  # every key is compared: constant time
            raise FleetEventRefused("signature", f"{SIGNATURE_HEADER}: found another key's, or of other bytes")
        return int(found[1])

    def check(self, subject: str, event: FleetEvent) -> None:
        """Raise `FleetEventRefused` if the event contradicts its subject, or the registration of its instance."""
        worker_id = event.worker_id
        expected = subject.rpartition(".")[0] + f".{worker_id}"
        if isinstance(event, WorkerRegistered):
            expected = subjects.fleet(event.model, worker_id)
        if subject != expected:
            raise FleetEventRefused("subject", f"subject: found {subject}, allowed {expected} by the event's fields")
        known = self._known.get(worker_id, _UNKNOWN)
        if known.instance != event.instance:
            return
        if subject != known.subject:
            raise FleetEventRefused("subject", f"subject: found {subject}, allowed {known.subject} of this instance")
        if isinstance(event, WorkerRegistered) and event.base_url != known.base_url:
            message = f"base_url: found {event.base_url}, allowed {known.base_url} of instance {event.instance}"
            raise FleetEventRefused("base_url", f"worker {worker_id}: {message}")

    def _remember(self, subject: str, event: FleetEvent, time_ns: int) -> None:
        known = self._known.pop(event.worker_id, _UNKNOWN)
        if isinstance(event, WorkerRegistered):
            known = _KnownWorker(subject, event.instance, event.base_url, time_ns)
        elif isinstance(event, WorkerLeft) and event.instance == known.instance:
            known = _KnownWorker("", "", "", time_ns)
        else:
            known = msgspec.structs.replace(known, time_ns=time_ns)
        if len(self._known) >= WORKERS_MAX:
            del self._known[next(iter(self._known))]
        self._known[event.worker_id] = known

    def headers(self, subject: str, worker_id: str, data: bytes, now_ns: int, claim: int = 0) -> dict[str, str]:
        """Return the headers to publish a worker's event with: a claim if it has one, a signature if there are keys.

        `now_ns`: since 1970.
        """
        headers = {CLAIM_HEADER: str(claim)} if claim else {}
        if self._keys:
            time_ns = str(max(now_ns, self._known.get(worker_id, _UNKNOWN).time_ns + 1))
            mac = _mac(self._keys[0], subject, data, time_ns, headers.get(CLAIM_HEADER, ""))
            headers[SIGNATURE_HEADER] = f"v1 {time_ns} {mac}"
        return headers


def claim_in(headers: Mapping[str, str] | None) -> int:
    """Return the claim in an event's headers; 0 if there is no valid one."""
    found = _CLAIM.fullmatch((headers or {}).get(CLAIM_HEADER, ""))
    return 0 if found is None else int(found[0])


def _mac(key: bytes, subject: str, data: bytes, time_ns: str, claim: str) -> str:
    signed = b"\n".join((_CONTEXT, subject.encode(), time_ns.encode(), claim.encode(), data))
    return hmac.new(key, signed, hashlib.sha256).hexdigest()
