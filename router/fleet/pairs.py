"""Which decode workers cannot take KV blocks from which prefill workers, by their registrations.

    field              a pair does not work if
    ----------------   -----------------------------------------------------------------
    block_size         they differ
    kv_cache_dtype     they differ in more than case, or one is not known
    transfer_backend   both name one, and they differ in more than case

A pair is checked once, when one of the two registers: a decision only looks the pair up. Only workers that serve a
common name are checked. Source: NVIDIA/TensorRT-LLM, `cpp/tensorrt_llm/batch_manager/cacheFormatter.cpp`,
`inquireSupport` (one data type, one block size), and `cacheTransceiver.cpp` (each backend has connections of its own).
"""

from collections.abc import Iterable, Mapping

from kv_protocol.errors import shortened
from kv_protocol.fleet import WorkerRegistered

PAIRS_MAX = 65_536
"""Largest number of misfits that are stored: 256 prefill workers, none of which fits any of 256 decode workers."""
UNKNOWN = "unknown"


def misfit(prefill: WorkerRegistered, decode: WorkerRegistered) -> str:
    """Return why `decode` cannot take the KV blocks of `prefill`; empty if no field excludes it."""
    if prefill.block_size != decode.block_size:
        return _reason("block_size", decode.block_size, prefill.block_size, prefill)
    theirs, ours = kv_dtype(prefill), kv_dtype(decode)
    if UNKNOWN in (theirs, ours):
        unknown = " and ".join(each.worker_id for each in (prefill, decode) if kv_dtype(each) == UNKNOWN)
        return f"kv transfer: found kv_cache_dtype unknown of {unknown}, allowed fp8, bfloat16 or the like"
    if theirs != ours:
        return _reason("kv_cache_dtype", ours, theirs, prefill)
    theirs, ours = prefill.transfer_backend.lower(), decode.transfer_backend.lower()
    return _reason("transfer_backend", ours, theirs, prefill) if theirs and ours and theirs != ours else ""


def kv_dtype(worker: WorkerRegistered) -> str:
    """Return the data type of the worker's KV cache in lower case, or `UNKNOWN`."""
    return worker.kv_cache_dtype.lower() if worker.kv_cache_dtype not in ("", "auto") else UNKNOWN


def _reason(field: str, found: object, allowed: object, prefill: WorkerRegistered) -> str:
    one, other = shortened(str(found)), shortened(str(allowed))
    return f"kv transfer: found {field} {one}, allowed {other} as prefill worker {prefill.worker_id} has"


class Pairs:
    """The pairs of a fleet that do not work. `misfits`: prefill worker id, decode worker id, reason.

    Beyond `pairs_max` a pair is not stored: it is used, and the engine refuses the transfer.
    """

    def __init__(self, pairs_max: int = PAIRS_MAX) -> None:
        self._pairs_max = pairs_max
        self.misfits: Mapping[str, Mapping[str, str]] = {}
        """Never changed in place: a view may reference it."""

    def registered(self, worker: WorkerRegistered, others: Iterable[WorkerRegistered]) -> None:
        """Check the worker's pairs anew, with each of the `others` in the fleet."""
        self.left(worker.worker_id)
        if worker.role not in ("prefill", "decode"):
            return
        found = {prefill: dict(misfits) for prefill, misfits in self.misfits.items()}
        remaining = self._pairs_max - sum(map(len, found.values()))
        for other in others:
            prefill, decode = (worker, other) if worker.role == "prefill" else (other, worker)
            if prefill.role != "prefill" or decode.role != "decode":
                continue
            serve_one_name = not set(prefill.served_names).isdisjoint(decode.served_names)
            if remaining > 0 and serve_one_name and (reason := misfit(prefill, decode)):
                found.setdefault(prefill.worker_id, {})[decode.worker_id] = reason
                remaining -= 1
        self.misfits = found

    def left(self, worker_id: str) -> None:
        """Forget the worker's pairs."""
        if not self.misfits:
            return
        remaining = {
            prefill: {decode: reason for decode, reason in misfits.items() if decode != worker_id}
            for prefill, misfits in self.misfits.items()
            if prefill != worker_id
        }
        self.misfits = {prefill: misfits for prefill, misfits in remaining.items() if misfits}
