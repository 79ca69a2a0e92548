"""Checks whether the workers of one model can work together, by their registrations; also when they register.

    pair.dtype        the KV cache of a prefill and a decode worker has different data types, or an unknown one
    pair.transfer     a prefill or decode worker's transfer buffer < longest input that is transferred through it; or
                      prefill and decode name different transfer backends

    longest input = min(own max_seq_len, the longest of the other role) - 1: one token is generated at least. A prefill
                    worker's `max_prompt_tokens` bounds it, too

Another value that a worker does not state causes no finding.
Source: `docs/SOURCES.md` D4.2 (the buffer's deadlock);
NVIDIA/TensorRT-LLM `cpp/tensorrt_llm/batch_manager/cacheFormatter.cpp` (`inquireSupport`: one data type).

`partner_findings`, for a fleet that had time to start: a role without the other, a transfer domain without a pair.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from kv_protocol.fleet import Role, WorkerRegistered
from router.doctor.catalogue import Finding, names
from router.fleet.pairs import UNKNOWN, kv_dtype

_ByValue = dict[str, list[WorkerRegistered]]
_OTHER: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}
PREFILLING: tuple[Role, ...] = ("aggregated", "prefill")
"""Roles that compute prompts: routing by prefix depends on their blocks."""


def pairing_findings(registrations: Sequence[WorkerRegistered]) -> list[Finding]:
    """Return the incompatibilities among the workers of one model; none where it is served by one role alone."""
    return [*_buffers(registrations), *_dtypes(registrations), *_backends(registrations)]


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


def _buffers(registrations: Sequence[WorkerRegistered]) -> Iterator[Finding]:
    longest = {role: _longest(_of_role(registrations, role)) for role in _OTHER}
    for registration in registrations:
        if registration.role not in _OTHER or not registration.transfer_buffer_tokens:
            continue
        both = [each for each in (_seq_len(registration), longest[_OTHER[registration.role]]) if each]
        longest_input = min(both, default=1) - 1
        if registration.transfer_buffer_tokens < longest_input:
            words = (
                f"transfer_buffer_tokens {registration.transfer_buffer_tokens}, the longest input has {longest_input}"
            )
            yield Finding("pair.transfer", registration.worker_id, words)


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


def _dtypes(registrations: Sequence[WorkerRegistered]) -> Iterator[Finding]:
    prefill, decode = by_role = [_by_value(_of_role(registrations, role), kv_dtype) for role in _OTHER]
    if prefill and decode and (len(prefill | decode) > 1 or UNKNOWN in prefill):
        yield Finding("pair.dtype", registrations[0].model, f"kv_cache_dtype: {_listed(by_role)}")


def _backends(registrations: Sequence[WorkerRegistered]) -> Iterator[Finding]:
    stated = [each for each in registrations if each.transfer_backend]
    by_role = [_by_value(_of_role(stated, role), lambda each: each.transfer_backend.lower()) for role in _OTHER]
    if all(by_role) and len(by_role[0] | by_role[1]) > 1:
        yield Finding("pair.transfer", registrations[0].model, f"transfer_backend: {_listed(by_role)}")


def _by_value(registrations: Iterable[WorkerRegistered], value: Callable[[WorkerRegistered], str]) -> _ByValue:
    found: _ByValue = {}
    for registration in registrations:
        found.setdefault(value(registration), []).append(registration)
    return found


def _listed(by_role: Sequence[_ByValue]) -> str:
    """Return the workers of each role and value."""
    return "; ".join(
        f"{role} {value}: {names(_ids(registrations))}"
        for role, values in zip(_OTHER, by_role, strict=True)
        for value, registrations in values.items()
    )


def _of_role(registrations: Iterable[WorkerRegistered], role: Role) -> list[WorkerRegistered]:
    return [registration for registration in registrations if registration.role == role]


def _ids(registrations: Iterable[WorkerRegistered]) -> list[str]:
    return [registration.worker_id for registration in registrations]
