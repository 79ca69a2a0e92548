"""Checks whether the workers of one model can work together, by their registrations; also when they register.

    pair.buffer       a prefill or decode worker's transfer buffer < longest input that is transferred through it
    pair.dtype        prefill and decode name different KV dtypes
    pair.dtype_auto   one of them states `auto`: the checkpoint decides
    pair.backend      prefill and decode name different transfer backends
    pair.reuse        no block reuse under a mode that reads overlap

    longest input = min(own max_seq_len, the longest of the other role) - 1: one token is generated at least. A prefill
                    worker's `max_prompt_tokens` bounds it, too

A value that a worker does not state causes no finding. Decode workers need no reuse: their blocks get no credit.
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


def pairing_findings(registrations: Sequence[WorkerRegistered], *, reads_overlap: bool) -> list[Finding]:
    """Return the incompatibilities among the workers of one model; `reads_overlap` is the mode's, as in `Mode`.

    Nothing where the model is served by one role alone and blocks are reused.
    """
    reuse = _reuse(registrations) if reads_overlap else ()
    return [*_buffers(registrations), *_dtypes(registrations), *_backends(registrations), *reuse]


def partner_findings(registrations: Sequence[WorkerRegistered]) -> Iterator[Finding]:
    """Yield workers of one model without a partner."""
    if not registrations:
        return
    model = registrations[0].model
    prefill, decode = (_of_role(registrations, role) for role in ("prefill", "decode"))
    aggregated = _of_role(registrations, "aggregated")
    if prefill and not decode:
        rest = f"{names(_ids(aggregated))} serve whole requests" if aggregated else "no worker serves the model"
        yield Finding("pair.prefill_alone", model, f"{names(_ids(prefill))} prefill, no worker decodes: {rest}")
    elif decode and not prefill:
        yield Finding("pair.decode_alone", model, f"{names(_ids(decode))} decode, no worker prefills")
    elif prefill:
        yield from _domains(prefill, decode)


def _domains(prefill: Sequence[WorkerRegistered], decode: Sequence[WorkerRegistered]) -> Iterator[Finding]:
    for check, here, there, role in (
        ("pair.prefill_domain", prefill, decode, "decode"),
        ("pair.decode_domain", decode, prefill, "prefill"),
    ):
        found = {registration.transfer_domain for registration in there}
        for registration in here:
            if registration.transfer_domain not in found:
                allowed = names(sorted(map(repr, found)))
                words = f"transfer_domain {registration.transfer_domain!r}, {role} workers are in {allowed}"
                yield Finding(check, registration.worker_id, words)


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
            yield Finding("pair.buffer", registration.worker_id, words)


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
    """Yield one finding per model, with the workers of each value."""
    apart, words = _apart(registrations, "kv_cache_dtype")
    if apart:
        check = "pair.dtype_auto" if all(_AUTO in pair for pair in apart) else "pair.dtype"
        yield Finding(check, registrations[0].model, words)


def _backends(registrations: Sequence[WorkerRegistered]) -> Iterator[Finding]:
    """Yield one finding per model, likewise."""
    apart, words = _apart(registrations, "transfer_backend")
    if apart:
        yield Finding("pair.backend", registrations[0].model, words)


def _apart(registrations: Sequence[WorkerRegistered], field: str) -> tuple[set[tuple[str, str]], str]:
    """Return the values of a field in which prefill and decode workers differ, and the workers of each value."""
    by_role = {role: _by_value(_of_role(registrations, role), field) for role in _OTHER}
    words = "; ".join(
        f"{role} {value}: {names(_ids(registration))}"
        for role, values in by_role.items()
        for value, registration in values.items()
    )
    return {(one, other) for one in by_role["prefill"] for other in by_role["decode"] if one != other}, words


def _by_value(registrations: Iterable[WorkerRegistered], field: str) -> dict[str, list[WorkerRegistered]]:
    found: dict[str, list[WorkerRegistered]] = {}
    for registration in registrations:
        if value := getattr(registration, field).lower():
            found.setdefault(value, []).append(registration)
    return found


def _reuse(registrations: Iterable[WorkerRegistered]) -> Iterator[Finding]:
    for registration in registrations:
        if registration.block_reuse is False and registration.role in PREFILLING:
            yield Finding(
                "pair.reuse", registration.worker_id, "block_reuse false, and the mode chooses by what workers hold"
            )


def _of_role(registrations: Iterable[WorkerRegistered], role: Role) -> list[WorkerRegistered]:
    return [registration for registration in registrations if registration.role == role]


def _ids(registrations: Iterable[WorkerRegistered]) -> list[str]:
    return [registration.worker_id for registration in registrations]
