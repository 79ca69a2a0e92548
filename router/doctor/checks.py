"""All checks of a fleet; `examine` runs them. `CATALOGUE` says what each finding means.

    heartbeats                     HTTP                   registered         finding
    of all ranks                   healthy                yes                none
    of some ranks, or of none      -                      yes                worker.silent
    of all ranks                   dead, or unhealthy     yes                worker.unhealthy
    of any rank                    -                      it left, and why   worker.withdrawn

    two `StreamHead`s of a rank at the same time, two workers at one address, one id under two models    worker.doubled

Heads one after the other are a restart. Without the log, missing heartbeats mean nothing.

Events and trust are checked only if a mode reads overlap: other modes do not use the index. If a rank is FALLBACK by
its parity or its events, those checks report it. Routers state how workers differ from parity
(`router/fleet/registry.py`, `router/prompt/engine_parity.py`, `router/feeds/watch.py`). Encode workers need no parity.

`pairing_findings`, also called when workers register, checks whether the workers of one model can work together:

    pair.dtype        the KV caches of a prefill and a decode worker have different data types, or an unknown one
    pair.transfer     a prefill or decode worker's transfer buffer < longest input that is transferred through it; or
                      prefill and decode name different transfer backends

    longest input = min(own max_seq_len, the longest of the other role) - 1: one token is generated at least. A prefill
                    worker's `max_prompt_tokens` bounds it, too

Except for the data type, a value that a worker does not state causes no finding.
Source: `docs/SOURCES.md` D4.2 (the buffer's deadlock);
NVIDIA/TensorRT-LLM `cpp/tensorrt_llm/batch_manager/cacheFormatter.cpp` (`inquireSupport`: one data type).

`partner_findings`, for a fleet that had time to start, finds workers without one of the other role in their domain.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import TypeVar

from kv_protocol.fleet import Role, WorkerRegistered
from router.doctor.facts import CATALOGUE, SEVERITIES, Finding, FleetFacts, Severity, StreamHead, names
from router.fleet.registry import UNKNOWN, kv_dtype
from router.fleet.trust import PARITY_FIELDS

_OTHER: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}
PREFILLING: tuple[Role, ...] = ("aggregated", "prefill")
"""Roles that compute prompts: routing by prefix depends on their blocks."""
FULL_RATIO = 0.9
"""A log filled to this share is nearly full: it is purged at 3/4 of its limit, unless no snapshot allows it."""
_AVOIDED = ("breaker", "busy")
SILENT_BLOCKS = 64
"""So many blocks in use make a rank without events a finding: an engine publishes a block only once it is computed."""
_UNTRUSTED = ("FALLBACK", "DEGRADED")
PARITY = {
    **dict.fromkeys(("block_size", "hash_scheme", "canary", "images"), "parity.hashes"),
    **dict.fromkeys(("tokenizer_digest", "template_digest", "prompt_ids"), "parity.tokens"),
    "kv_events": "parity.kv_events",
}
"""The finding for each field in which a worker may differ from a router; for `event_source` it is `events.none`."""
_SHOWN_MAX = 80
_SPLIT = {"prefill", "decode"}
_EXIT_CODES: dict[Severity, int] = {"error": 2, "warning": 1}
_T = TypeVar("_T")
_K = TypeVar("_K")


def pairing_findings(registrations: Sequence[WorkerRegistered]) -> list[Finding]:
    """Return the incompatibilities among the workers of one model; none if all have the same role."""
    by_role = {role: _of_role(registrations, role) for role in _OTHER}
    longest = {role: _longest(workers) for role, workers in by_role.items()}
    found = []
    for worker in chain(*by_role.values()):
        both = [each for each in (_seq_len(worker), longest[_OTHER[worker.role]]) if each]
        longest_input = min(both, default=1) - 1
        if 0 < worker.transfer_buffer_tokens < longest_input:
            words = f"transfer_buffer_tokens {worker.transfer_buffer_tokens}, the longest input has {longest_input}"
            found.append(Finding("pair.transfer", worker.worker_id, words))
    for check, field, value_of in (
        ("pair.dtype", "kv_cache_dtype", kv_dtype),
        ("pair.transfer", "transfer_backend", _backend),
    ):
        values = {role: _by(filter(value_of, workers), value_of) for role, workers in by_role.items()}
        different = {value for of_role in values.values() for value in of_role}
        if all(values.values()) and (len(different) > 1 or UNKNOWN in different):
            listed = (
                f"{role} {value}: {names(_ids(workers))}"
                for role, of_role in values.items()
                for value, workers in of_role.items()
            )
            found.append(Finding(check, registrations[0].model, f"{field}: {'; '.join(listed)}"))
    return found


def partner_findings(registrations: Sequence[WorkerRegistered]) -> Iterator[Finding]:
    """Yield workers of one model without a partner."""
    prefill, decode = (_of_role(registrations, role) for role in ("prefill", "decode"))
    if prefill and not decode:
        model = registrations[0].model
        words = f"{names(_ids(prefill))} prefill, no worker decodes"
        yield Finding("pair.alone" if _of_role(registrations, "aggregated") else "fleet.empty", model, words)
    elif decode and not prefill:
        words = f"{names(_ids(decode))} decode, no worker prefills"
        yield Finding("pair.alone", registrations[0].model, words)
    elif prefill:
        yield from _domains(prefill, decode)


def _domains(prefill: Sequence[WorkerRegistered], decode: Sequence[WorkerRegistered]) -> Iterator[Finding]:
    for here, there, role in ((prefill, decode, "decode"), (decode, prefill, "prefill")):
        found = {registration.transfer_domain for registration in there}
        for registration in here:
            if registration.transfer_domain not in found:
                allowed = names(sorted(map(repr, found)))
                words = f"transfer_domain {registration.transfer_domain!r}, {role} workers are in {allowed}"
                yield Finding("pair.alone", registration.worker_id, words)


def _longest(registrations: Sequence[WorkerRegistered]) -> int:
    """Return the longest sequence that a worker takes; 0 (no bound) without a worker, or if one states none."""
    lengths = [_seq_len(registration) for registration in registrations]
    return max(lengths, default=0) if all(lengths) else 0


def _seq_len(registration: WorkerRegistered) -> int:
    """Return a worker's longest prompt plus one token; 0 if not stated."""
    prompt = (
        registration.max_prompt_tokens + 1 if registration.max_prompt_tokens and registration.role == "prefill" else 0
    )
    return min((bound for bound in (registration.max_seq_len, prompt) if bound), default=0)


def _backend(registration: WorkerRegistered) -> str:
    return registration.transfer_backend.lower()


def _of_role(registrations: Iterable[WorkerRegistered], role: Role) -> list[WorkerRegistered]:
    return [registration for registration in registrations if registration.role == role]


def _ids(registrations: Iterable[WorkerRegistered]) -> list[str]:
    return [registration.worker_id for registration in registrations]


def log(facts: FleetFacts) -> Iterator[Finding]:
    """Yield the problems of the log."""
    if facts.log_problem:
        yield Finding("log.unreachable", "the log", facts.log_problem)
    for name, (used, most) in facts.fills.items():
        if most > 0 and used >= FULL_RATIO * most:
            yield Finding("log.full", name, f"{used} of {most} bytes are taken")


def planes(facts: FleetFacts) -> Iterator[Finding]:
    """Yield the planes of routers that do not serve."""
    for answer in [*(router.control for router in facts.routers), *facts.planes]:
        if words := answer.problem or answer.reason:
            yield Finding("router.not_ready", answer.url, words)


def routers(facts: FleetFacts) -> Iterator[Finding]:
    """Yield problems inside the routers that answered."""
    living = {worker.registration.worker_id for worker in facts.living()}
    for router in facts.routers:
        if router.control.problem:
            continue
        known = [worker.registration.worker_id for worker in router.after.workers]
        if living and router.mode and living.isdisjoint(known):
            words = f"the router knows {names(known) or 'no worker'}, but on this log live {names(sorted(living))}"
            yield Finding("router.other_fleet", router.control.url, words)
        for each in router.after.ranks():
            if each.unfit.startswith(_AVOIDED):
                yield Finding("breaker.open", str(each.rank), f"{each.unfit} (router {router.control.url})")


def events(facts: FleetFacts) -> Iterator[Finding]:
    """Yield workers without KV events or block reuse, and ranks that published no event."""
    if not facts.is_by_prefix:
        return
    for worker in facts.living():
        registration = worker.registration
        if registration.role in PREFILLING:
            lacks = ["event_source none"] if registration.event_source == "none" else []
            lacks += ["block_reuse false"] if registration.block_reuse is False else []
            if lacks:
                words = f"{', '.join(lacks)}, and the mode chooses by what is held"
                yield Finding("events.none", registration.worker_id, words)
    yield from _silent(facts)


def _silent(facts: FleetFacts) -> Iterator[Finding]:
    registrations = {
        worker.registration.worker_id: worker.registration
        for worker in facts.living()
        if worker.registration.event_source != "none"
    }
    for head in facts.heads:
        worker = registrations.get(head.rank.worker_id)
        if worker is None or worker.instance != head.instance or head.last_seq or head.stale:
            continue
        if (blocks := facts.used_blocks.get(head.rank, 0)) >= SILENT_BLOCKS:
            source = f"event_source {worker.event_source}"
            words = f"its engine reports {blocks} blocks in use, but published no KV event ({source})"
            yield Finding("events.none", str(head.rank), words)


def trust(facts: FleetFacts) -> Iterator[Finding]:
    """Yield the ranks that a router called DEGRADED, or FALLBACK, at both looks, by reason."""
    eventful = {each.registration.worker_id for each in facts.living() if each.registration.event_source != "none"}
    for router in facts.routers:
        was = {(each.rank, each.trust) for each in router.before.ranks()}
        reasons: dict[str, list[str]] = {}
        for each in router.after.ranks() if router.reads_overlap else ():
            is_untrusted = each.trust in _UNTRUSTED and not each.trust_reason.startswith(PARITY_FIELDS)
            if is_untrusted and (each.rank, each.trust) in was and each.rank.worker_id in eventful:
                reasons.setdefault(f"{each.trust}: {each.trust_reason}", []).append(str(each.rank))
        for reason, ranks in reasons.items():
            yield Finding("rank.untrusted", names(ranks), f"{reason} (router {router.control.url})")


def parity(facts: FleetFacts) -> Iterator[Finding]:
    """Yield the workers that, as a router states, hash prompts otherwise, or have the events of another worker."""
    judged = {
        each.worker_id
        for registrations in facts.models().values()
        for each in registrations
        if each.role != "encode" and (facts.is_by_prefix or {other.role for other in registrations} >= _SPLIT)
    }
    differing = [
        (worker.registration.worker_id, differs, router.control.url)
        for router in facts.routers
        for worker in router.after.workers
        for differs in worker.differs
        if worker.registration.worker_id in judged and differs.field in PARITY
    ]
    for (worker_id, differs), found in _by(differing, lambda each: each[:2]).items():
        words = f"{differs.field}: found {_shown(differs.found)}, allowed {_shown(differs.allowed)}"
        yield Finding(PARITY[differs.field], worker_id, f"{words} (router {names([url for *_, url in found])})")


def _shown(value: object) -> str:
    return str(value) if len(str(value)) <= _SHOWN_MAX else f"{str(value)[:_SHOWN_MAX]}..."


def presence(facts: FleetFacts) -> Iterator[Finding]:
    """Yield workers that are missing from the fleet, or from HTTP."""
    if not facts.workers and not facts.log_problem:
        refused = f"; refused: {facts.refused}" if facts.refused else ""
        words = f"no worker is registered; {len(facts.left)} left, {facts.draining} drain{refused}"
        yield Finding("fleet.empty", "the fleet", words)
    beating = {(head.rank, head.instance) for head in facts.heads}
    for worker in facts.workers:
        registration, http = worker.registration, worker.http
        silent = [each for each in registration.ranks if (each, registration.instance) not in beating]
        if silent and not facts.log_problem:
            says = http.problem or http.reason or "that all is well"
            words = f"no heartbeat of {names(list(map(str, silent)))} in {facts.window_s:.1f} s; its HTTP says {says}"
            yield Finding("worker.silent", registration.worker_id, words)
        elif words := http.problem or http.reason:
            yield Finding("worker.unhealthy", registration.worker_id, words)
    for worker_id in sorted({head.rank.worker_id for head in facts.heads} & facts.left.keys()):
        words = f"it beats, and left: {facts.left[worker_id] or 'no reason given'}"
        yield Finding("worker.withdrawn", worker_id, words)


def doubles(facts: FleetFacts) -> Iterator[Finding]:
    """Yield what two workers state though it must be unique: a rank's stream, an address, an id."""
    for rank, heads in _by(sorted(facts.heads, key=lambda head: head.first_s), lambda head: head.rank).items():
        if words := next((_at_once(one, other) for one, other in pairwise(heads) if _overlap(one, other)), ""):
            yield Finding("worker.doubled", str(rank), words)
    living = [worker.registration for worker in facts.living()]
    for url, at in _by(living, lambda registration: registration.base_url.rstrip("/").lower()).items():
        if len(at) > 1:
            ids = names([registration.worker_id for registration in at])
            yield Finding("worker.doubled", ids, f"all are at {url}")
    for worker_id, same in _by(living, lambda registration: registration.worker_id).items():
        models = sorted({registration.model for registration in same})
        if len(models) > 1:
            yield Finding("worker.doubled", worker_id, f"it is registered for several models: {names(models)}")


def _overlap(one: StreamHead, other: StreamHead) -> bool:
    return other.first_s < one.last_s and one.first_s < other.last_s


def _at_once(one: StreamHead, other: StreamHead) -> str:
    if one.instance == other.instance:
        return f"epochs {one.epoch} and {other.epoch} of instance {one.instance} beat at the same time"
    return f"instances {one.instance} and {other.instance} beat at the same time"


def _by(every: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    found: dict[_K, list[_T]] = {}
    for each in every:
        found.setdefault(key(each), []).append(each)
    return found


def pairing(facts: FleetFacts) -> Iterator[Finding]:
    """Yield the workers of a model that cannot work together, or lack a partner."""
    for registrations in facts.models().values():
        yield from pairing_findings(registrations)
        yield from partner_findings(registrations)


CHECKS = (log, presence, doubles, planes, routers, parity, pairing, events, trust)


def examine(facts: FleetFacts) -> list[Finding]:
    """Return what is wrong: the worst first, then by id and by the subject of the finding; each once."""
    found = dict.fromkeys(finding for check in CHECKS for finding in check(facts))
    return sorted(found, key=lambda each: (SEVERITIES.index(CATALOGUE[each.id].severity), each.id, each.of))


def exit_code(findings: Sequence[Finding]) -> int:
    """Return the exit code of a look that found these."""
    return max((_EXIT_CODES[CATALOGUE[finding.id].severity] for finding in findings), default=0)
