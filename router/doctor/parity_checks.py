"""Checks whether all workers of a model, and the routers, hash and tokenize alike.

    parity.hashes     block sizes, hash schemes or image rules differ; or a worker's canary does not match its own
    parity.tokens     tokenizers or chat templates differ, or an engine makes other token ids of a chat than a router
    parity.kv_events  the blocks of a worker's requests appear at another

A router reports only fields in which it differs from a worker; its value is then shown beside the workers'. Encode
workers have no KV cache, and need no parity.
"""

from collections.abc import Iterator, Sequence

from kv_protocol.fleet import WorkerRegistered
from kv_protocol.hashing import canary
from kv_protocol.images import rule_text
from router.doctor.catalogue import Finding, names
from router.doctor.facts import FleetFacts

AGREED = {
    **dict.fromkeys(("block_size", "hash_scheme", "images"), "parity.hashes"),
    **dict.fromkeys(("tokenizer_digest", "template_digest"), "parity.tokens"),
}
"""Parity fields in which all workers must agree, and the finding; in the others each worker is judged by itself."""
_OBSERVED = {"prompt_ids": "parity.tokens", "kv_events": "parity.kv_events"}
_SHOWN_MAX = 80
_SPLIT = {"prefill", "decode"}


def parity(facts: FleetFacts) -> Iterator[Finding]:
    """Yield the fields in which a model's workers, and the routers, differ, if that affects routing."""
    for model, workers in facts.models().items():
        registrations = [each for each in workers if each.role != "encode"]
        if not facts.is_by_prefix and not {each.role for each in registrations} >= _SPLIT:
            continue
        yield from _canaries(registrations)
        for field, check in AGREED.items():
            groups = _groups(facts, registrations, field)
            if len(groups) > 1:
                words = "; ".join(f"{_shown(value)}: {names(ids)}" for value, ids in groups.items())
                yield Finding(check, model, f"{field} {words}")


def observed(facts: FleetFacts) -> Iterator[Finding]:
    """Yield what routers observed: an engine tokenizes a chat to other ids, or its blocks appear at another worker."""
    told = {(each.field, each.worker_id): each for router in facts.routers for each in router.broken}
    for (field, worker_id), broken in told.items():
        if field in _OBSERVED:
            yield Finding(_OBSERVED[field], worker_id, f"found {broken.found}, allowed {broken.allowed}")


def _groups(facts: FleetFacts, registrations: Sequence[WorkerRegistered], field: str) -> dict[str, list[str]]:
    """Return the workers of each value."""
    groups: dict[str, list[str]] = {}
    for each in registrations:
        groups.setdefault(_value(each, field), []).append(each.worker_id)
    ids = {each.worker_id for each in registrations}
    for router in facts.routers:
        wanted = {each.allowed for each in router.broken if each.field == field and each.worker_id in ids}
        for value in sorted(wanted):
            groups.setdefault(value, []).append(f"router {router.control.url}")
    return groups


def _value(registration: WorkerRegistered, field: str) -> str:
    return rule_text(registration.images) if field == "images" else str(getattr(registration, field))


def _canaries(registrations: Sequence[WorkerRegistered]) -> Iterator[Finding]:
    for each in registrations:
        if each.canary != (ours := canary(each.block_size, each.hash_scheme)):
            yield Finding("parity.hashes", each.worker_id, f"canary: found {each.canary}, here it is {ours}")


def _shown(value: str) -> str:
    return value if len(value) <= _SHOWN_MAX else f"{value[:_SHOWN_MAX]}..."
