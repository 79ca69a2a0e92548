"""Checks whether all workers of a model hash, tokenize and run alike.

    parity.<field>    the workers of a model, and the routers, have different values
    parity.prompt_ids an engine makes other token ids of a chat than a router
    parity.canary     a worker's canary does not match its block size and hash scheme: it hashes differently
    version.engine    engines of one kind (by their events) that serve one model have several versions
    version.range     a registered TensorRT-LLM engine has a version outside the supported range
    version.router    routers, data planes and agents that state a version have several

A router reports only fields in which it differs from a worker; its value is then shown beside the workers'. Encode
workers have no KV cache, and need no parity.
"""

from collections.abc import Iterator, Mapping, Sequence

from kv_protocol.fleet import WorkerRegistered
from kv_protocol.hashing import canary
from kv_protocol.images import rule_text
from kv_protocol.trtllm_versions import SUPPORTED, is_supported, parse_version
from router.doctor.facts import AddressAnswer, FleetFacts
from router.doctor.findings import Finding, names

AGREED = ("block_size", "hash_scheme", "tokenizer_digest", "template_digest", "images")
"""Parity fields in which all workers must agree; in the others each worker is judged by itself."""
_SHOWN_MAX = 80
_SPLIT = {"prefill", "decode"}


def parity(facts: FleetFacts) -> Iterator[Finding]:
    """Yield the fields in which a model's workers, and the routers, differ, if that affects routing."""
    for model, workers in facts.models().items():
        registrations = [each for each in workers if each.role != "encode"]
        if not facts.is_by_prefix and not {each.role for each in registrations} >= _SPLIT:
            continue
        yield from _canaries(registrations)
        for field in AGREED:
            groups = _groups(facts, registrations, field)
            if len(groups) > 1:
                words = "; ".join(f"{_shown(value)}: {names(ids)}" for value, ids in groups.items())
                yield Finding(f"parity.{field}", model, words)


def observed(facts: FleetFacts) -> Iterator[Finding]:
    """Yield what routers observed: an engine tokenizes a chat to other ids, or its blocks appear at another worker."""
    told = {(each.field, each.worker_id): each for router in facts.routers for each in router.broken}
    for (field, worker_id), broken in told.items():
        if field in ("prompt_ids", "kv_events"):
            yield Finding(f"parity.{field}", worker_id, f"found {broken.found}, allowed {broken.allowed}")


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
            yield Finding("parity.canary", each.worker_id, f"found {each.canary}, here it is {ours}")


def _shown(value: str) -> str:
    return value if len(value) <= _SHOWN_MAX else f"{value[:_SHOWN_MAX]}..."


def versions(facts: FleetFacts) -> Iterator[Finding]:
    """Yield software with several versions."""
    for model, workers in facts.models().items():
        by_kind: dict[str, dict[str, list[str]]] = {}
        for registration in workers:
            if registration.version and registration.event_source != "none":
                by_kind.setdefault(registration.event_source, {}).setdefault(registration.version, []).append(
                    registration.worker_id
                )
        for kind, groups in by_kind.items():
            if len(groups) > 1:
                yield Finding("version.engine", model, f"{kind}: {_ids_by_version(groups)}")
        yield from _outside_the_range(model, by_kind.get("trtllm", {}))
    ours: dict[str, list[str]] = {}
    for answer in [*(router.control for router in facts.routers), *facts.planes, *_agents(facts)]:
        if answer.version:
            ours.setdefault(answer.version, []).append(answer.url)
    if len(ours) > 1:
        yield Finding("version.router", "the fleet", _ids_by_version(ours))


def _agents(facts: FleetFacts) -> Iterator[AddressAnswer]:
    return (worker.http for worker in facts.living() if worker.http is not None)


def _outside_the_range(model: str, groups: Mapping[str, list[str]]) -> Iterator[Finding]:
    """Yield the workers of an unsupported TensorRT-LLM version; a text that is no version is not judged."""
    outside = {
        version: workers for version, workers in groups.items() if parse_version(version) and not is_supported(version)
    }
    if outside:
        yield Finding("version.range", model, f"{_ids_by_version(outside)}; supported: {SUPPORTED}")


def _ids_by_version(groups: dict[str, list[str]]) -> str:
    return "; ".join(f"{version}: {names(ids)}" for version, ids in groups.items())
