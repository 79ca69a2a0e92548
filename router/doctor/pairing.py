"""Checks whether the workers of one model can work together, by their registrations; also when they register.

    pair.transfer     a prefill or decode worker's transfer buffer < longest input that is transferred through it; or
                      prefill and decode name different KV dtypes or transfer backends

    longest input = min(own max_seq_len, the longest of the other role) - 1: one token is generated at least. A prefill
                    worker's `max_prompt_tokens` bounds it, too

A value that a worker does not state causes no finding; nor does a dtype `auto`, which is the checkpoint's.
Source: `docs/SOURCES.md` D4.2 (the buffer's deadlock);
NVIDIA/TensorRT-LLM `cpp/tensorrt_llm/batch_manager/cacheFormatter.cpp` (`inquireSupport`: one data type).

`partner_findings`, for a fleet that had time to start: a role without the other, a transfer domain without a pair.
"""

from collections.abc import Iterable, Iterator, Sequence

from kv_protocol.fleet import Role, WorkerRegistered
from router.doctor.findings import Finding, names

_AUTO = "auto"
_OTHER: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}
PREFILLING: tuple[Role, ...] = ("aggregated", "prefill")
"""Roles that compute prompts: routing by prefix depends on their blocks."""


def pairing_findings(registrations: Sequence[WorkerRegistered]) -> list[Finding]:
    """Return the incompatibilities among the workers of one model; none where it is served by one role alone."""
    apart = (_apart(registrations, field) for field in ("kv_cache_dtype", "transfer_backend"))
    return [*_buffers(registrations), *(each for findings in apart for each in findings)]


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


def _apart(registrations: Sequence[WorkerRegistered], field: str) -> Iterator[Finding]:
    """Yield one finding if prefill and decode workers differ in a field, with the workers of each value."""
    by_role = {role: _by_value(_of_role(registrations, role), field) for role in _OTHER}
    if any(one != other for one in by_role["prefill"] for other in by_role["decode"]):
        words = "; ".join(
            f"{role} {value}: {names(_ids(registration))}"
            for role, values in by_role.items()
            for value, registration in values.items()
        )
        yield Finding("pair.transfer", registrations[0].model, f"{field}: {words}")


def _by_value(registrations: Iterable[WorkerRegistered], field: str) -> dict[str, list[WorkerRegistered]]:
    found: dict[str, list[WorkerRegistered]] = {}
    for registration in registrations:
        if (value := getattr(registration, field).lower()) not in ("", _AUTO):
            found.setdefault(value, []).append(registration)
    return found


def _of_role(registrations: Iterable[WorkerRegistered], role: Role) -> list[WorkerRegistered]:
    return [registration for registration in registrations if registration.role == role]


def _ids(registrations: Iterable[WorkerRegistered]) -> list[str]:
    return [registration.worker_id for registration in registrations]
