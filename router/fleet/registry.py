"""The workers and ranks of the fleet: a fold over fleet events and heartbeats.

    registered, new instance     known; the state of the former instance is dropped
    heartbeat                    alive, if the heartbeat is of the registered instance
    silent for `SILENT_S`        not eligible, unless all workers are silent: then heartbeats fail, not workers
    draining / left              takes no new work / forgotten, if the event is of the registered instance
    fleet full                   a registration beyond `WORKERS_MAX` or `RANKS_MAX` changes nothing

A model's block size, hash scheme and rule for images are what its eldest fit worker states (its eldest worker, if none
is fit); its tokenizer and template are this router's. A worker that differs has no parity: its events cannot be
compared with prompts. Every field that differs is named.

Whether a decode worker can take KV blocks from a prefill worker:

    field              a pair does not work if
    ----------------   -----------------------------------------------------------------
    block_size         they differ
    kv_cache_dtype     they differ in more than case, or one is not known
    transfer_backend   both name one, and they differ in more than case

Only workers that serve one model are compared. Source: NVIDIA/TensorRT-LLM,
`cpp/tensorrt_llm/batch_manager/cacheFormatter.cpp`, `inquireSupport` (one data type, one block size), and
`cacheTransceiver.cpp` (each backend has connections of its own).
"""

from collections.abc import Callable, Iterable, Mapping, ValuesView
from functools import cache
from typing import Literal, NamedTuple, get_args

import msgspec

from kv_protocol.errors import shortened
from kv_protocol.fleet import (
    HEARTBEAT_PERIOD_S,
    MISSED_HEARTBEATS_MAX,
    FleetEvent,
    Role,
    WorkerDraining,
    WorkerLeft,
    WorkerRegistered,
)
from kv_protocol.hashing import HASH_SCHEME, HASH_SCHEMES, Hashing, canary
from kv_protocol.ids import WorkerRank
from kv_protocol.images import ImageRule, rule_text
from router.fleet.trust import PARITY_FIELDS, Disparity

UNKNOWN = "unknown"
_PUBLISHES = "one that tells of its blocks"
SILENT_S = HEARTBEAT_PERIOD_S * MISSED_HEARTBEATS_MAX
WORKERS_MAX = 4096
RANKS_MAX = 8192
"""Limits of the fleet: twice as many as one index serves. The state of a rank takes about a kilobyte."""
RefusalCause = Literal["instance", "unregistered", "no_room"]
REFUSAL_CAUSES: tuple[RefusalCause, ...] = get_args(RefusalCause)
"""The event is of another instance than the registered one, or of an unregistered worker; or the fleet is full."""


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


def kinds(workers: Iterable[WorkerRegistered], role: Role) -> list[WorkerRegistered]:
    """Return one worker of this role for each combination of the fields that `misfit` reads."""
    own = [each for each in workers if each.role == role]
    return [*{(each.block_size, kv_dtype(each), each.transfer_backend.lower()): each for each in own}.values()]


class FleetRefusal(NamedTuple):
    """Why a fleet event changes nothing."""

    cause: RefusalCause
    reason: str


class TextDigests(msgspec.Struct, frozen=True):
    """Digests of the tokenizer and the template that the router encodes prompts with."""

    tokenizer: str
    template: str


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one worker."""

    registration: WorkerRegistered
    canary: int
    """The expected canary, by the block size and hash scheme that it states."""
    heard_at_s: float | None = None
    draining: bool = False
    drained_by_hand: bool = False
    """Whether an operator drained the worker, and may put it back; False once its agent drains it to stop."""


class Fleet:
    """All workers by id, eldest first."""

    def __init__(self, text: TextDigests) -> None:
        self._text = text
        self._workers: dict[str, Worker] = {}
        self.worker: Callable[[str], Worker | None] = self._workers.get
        """Returns the worker of this id; None if it is unknown."""
        self.workers: Callable[[], ValuesView[Worker]] = self._workers.values
        """Returns all workers, eldest first."""
        self._rank_count = 0
        self._ranks: tuple[WorkerRank, ...] | None = ()
        """None: a worker has registered or left since `ranks` was read."""
        self._parity: Mapping[str, tuple[Disparity, ...]] = {}
        self._parity_of, self._parity_until_s = 0, float("-inf")
        self.is_log_connected = True
        self._heard_last_s = float("-inf")
        """The latest `heard_at_s` of all workers."""
        self.refused_total = 0
        self.changes = 0
        """Increases with every event that may have changed an answer about a worker."""

    def refusal(self, event: FleetEvent) -> FleetRefusal | None:
        """Return why the event changes nothing; None if it is valid."""
        known = self._workers.get(event.worker_id)
        if isinstance(event, WorkerRegistered):
            ranks = self._rank_count + len(event.dp_ranks) - (0 if known is None else len(known.registration.dp_ranks))
            if known is None and len(self._workers) >= WORKERS_MAX:
                return FleetRefusal("no_room", f"workers: found one more, allowed {WORKERS_MAX}")
            if ranks > RANKS_MAX:
                return FleetRefusal("no_room", f"ranks of all workers: found {ranks}, allowed {RANKS_MAX}")
        elif known is None:
            return FleetRefusal("unregistered", f"worker_id: found {event.worker_id}, allowed a registered worker")
        elif known.registration.instance != event.instance:
            allowed = f"{known.registration.instance}, the registered one"
            return FleetRefusal("instance", f"instance: found {event.instance}, allowed {allowed}")
        return None

    def apply(self, event: FleetEvent) -> bool:
        """Fold a fleet event in; return whether it is valid: one with a `refusal` changes nothing."""
        self.changes += 1
        if self.refusal(event) is not None:
            self.refused_total += isinstance(event, WorkerRegistered)
            return False
        known = self._workers.get(event.worker_id)
        if isinstance(event, WorkerRegistered):
            self._register(event, known)
            return True
        assert known is not None
        if isinstance(event, WorkerLeft):
            self._forget(known)
        elif isinstance(event, WorkerDraining):
            self._workers[event.worker_id] = msgspec.structs.replace(
                known, draining=True, drained_by_hand=event.by_hand and (known.drained_by_hand or not known.draining)
            )
        return True

    def _register(self, event: WorkerRegistered, known: Worker | None) -> None:
        if known is not None and known.registration.instance != event.instance:
            self._forget(known)
            known = None
        expected = canary(event.block_size, event.hash_scheme)
        before = known or Worker(registration=event, canary=expected)
        is_by_hand = before.drained_by_hand or (event.drained and not before.draining)
        is_put_back = event.ends_drain and is_by_hand
        self._workers[event.worker_id] = msgspec.structs.replace(
            before,
            registration=event,
            canary=expected,
            draining=(before.draining or event.drained) and not is_put_back,
            drained_by_hand=is_by_hand and not is_put_back,
        )
        self._rank_count += len(event.dp_ranks) - (0 if known is None else len(known.registration.dp_ranks))
        self._ranks = None

    def _forget(self, known: Worker) -> None:
        del self._workers[known.registration.worker_id]
        self._rank_count -= len(known.registration.dp_ranks)
        self._ranks = None
        if known.heard_at_s == self._heard_last_s:
            self._heard_last_s = max(
                (each.heard_at_s for each in self.workers() if each.heard_at_s is not None), default=float("-inf")
            )

    def on_heartbeat(self, worker_id: str, instance: str, now_s: float) -> None:
        """Note that a heartbeat came; one of another instance than the registered one does not count."""
        known = self._workers.get(worker_id)
        if known is not None and known.registration.instance == instance:
            self._workers[worker_id] = msgspec.structs.replace(known, heard_at_s=now_s)
            self._heard_last_s = now_s
            # Also if all workers were silent, which makes none unfit: from now on the others are.
            self.changes += known.heard_at_s is None or now_s >= known.heard_at_s + SILENT_S

    def on_log_connection(self, *, connected: bool, now_s: float) -> None:
        """Note that the log was connected or lost; after a reconnection workers have `SILENT_S` for a heartbeat."""
        if connected and not self.is_log_connected:
            for worker_id, worker in self._workers.items():
                if worker.heard_at_s is not None:
                    self._workers[worker_id] = msgspec.structs.replace(worker, heard_at_s=now_s)
                    self._heard_last_s = now_s
        self.is_log_connected = connected
        self.changes += 1

    def restore(self, worker: Worker) -> None:
        """Restore a worker as the youngest: call this in the order in which `workers` returned them."""
        self._workers[worker.registration.worker_id] = worker
        self._rank_count += len(worker.registration.dp_ranks)
        self._ranks = None
        self._heard_last_s = max(self._heard_last_s, float("-inf") if worker.heard_at_s is None else worker.heard_at_s)
        self.changes += 1

    @property
    def ranks(self) -> tuple[WorkerRank, ...]:
        """All ranks, by worker, eldest first. The same object until a worker registers or leaves."""
        if self._ranks is None:
            self._ranks = tuple(rank for worker in self.workers() for rank in worker.registration.ranks)
        return self._ranks

    def models(self) -> tuple[str, ...]:
        """Return the names that requests may use, each once: of models, then of adapters."""
        registrations = [worker.registration for worker in self.workers()]
        names = [name for each in registrations for name in each.served_names]
        return tuple(dict.fromkeys([*names, *(lora for each in registrations for lora in each.loras)]))

    def lora_of(self, model: str) -> str:
        """Return the adapter of this name; empty for a model's own name, and for an unknown one."""
        serving = [worker.registration for worker in self.serving(model)]
        return model if serving and not any(model in each.served_names for each in serving) else ""

    def serving(self, model: str) -> list[Worker]:
        """Return the workers that serve a model by this name, or have loaded an adapter of this name, eldest first."""
        known = ((worker, worker.registration) for worker in self.workers())
        return [worker for worker, each in known if model in each.served_names or model in each.loras]

    def hashing(self, model: str, now_s: float) -> Hashing | None:
        """Return how prompts for a model are hashed; None if it has no worker."""
        registration = self._eldest(model, now_s)
        if registration is None:
            return None
        return Hashing(
            registration.block_size,
            registration.hash_scheme if registration.hash_scheme in HASH_SCHEMES else HASH_SCHEME,
        )

    def images(self, model: str, now_s: float) -> ImageRule | None:
        """Return what replaces images in prompts for a model; None if no worker states it."""
        registration = self._eldest(model, now_s)
        return None if registration is None else registration.images

    def _eldest(self, model: str, now_s: float) -> WorkerRegistered | None:
        """Return the registration that defines a model's prompts; an encoder's only if there is no other."""
        serving = self.serving(model)
        serving = [worker for worker in serving if worker.registration.role != "encode"] or serving
        eldest = next((worker for worker in serving if not self.unfit(worker, now_s)), next(iter(serving), None))
        return None if eldest is None else eldest.registration

    def unfit(self, worker: Worker, now_s: float) -> str:
        """Return why the worker takes no new work now; empty if it does."""
        if worker.draining:
            return "draining"
        if worker.heard_at_s is None:
            return "no heartbeat yet"
        if self.is_log_connected and worker.heard_at_s + SILENT_S <= now_s < self._heard_last_s + SILENT_S:
            return f"silent for {SILENT_S:.0f} s or longer"
        return ""

    def silence(self, worker: Worker) -> str:
        """Return a text that says for how long the worker is silent; empty if it is not, or if all workers are.

        If all workers are silent, heartbeats fail, not workers.
        """
        if worker.heard_at_s is None or self._heard_last_s < worker.heard_at_s + SILENT_S or not self.is_log_connected:
            return ""
        return f"silent for {SILENT_S:.0f} s or longer"

    def valid_until_s(self, workers: Iterable[Worker], now_s: float) -> float:
        """Return the next time at which `unfit` of one of these changes without an event; inf: never."""
        heartbeats_s = [worker.heard_at_s for worker in workers if worker.heard_at_s is not None]
        heartbeats_s.append(self._heard_last_s)
        return min((each + SILENT_S for each in heartbeats_s if each + SILENT_S > now_s), default=float("inf"))

    def disparities(self, worker: Worker, hashing: Hashing, images: ImageRule | None = None) -> tuple[Disparity, ...]:
        """Return the fields in which the worker's registration differs from how prompts are hashed; empty: parity."""
        its, ours = worker.registration, self._text
        source = _PUBLISHES if its.event_source != "none" else its.event_source
        found: tuple[str | int, ...] = (
            its.block_size, its.hash_scheme, its.canary, its.tokenizer_digest, its.template_digest
        )  # fmt: skip
        allowed: tuple[str | int, ...] = (
            hashing.block_size, hashing.scheme, worker.canary, ours.tokenizer, ours.template
        )  # fmt: skip
        if found == allowed and its.images == images and source == _PUBLISHES:
            return ()
        found, allowed = (*found, rule_text(its.images), source), (*allowed, rule_text(images), _PUBLISHES)
        return tuple(each for each in map(Disparity, PARITY_FIELDS, found, allowed) if each.found != each.allowed)

    def parity(self, now_s: float) -> Mapping[str, tuple[Disparity, ...]]:
        """Return `differences` of all workers; the same object while the answer stays the same."""
        if self.changes != self._parity_of or now_s >= self._parity_until_s:
            found = self.differences(self.workers(), now_s)
            self._parity = self._parity if found == self._parity else found
            self._parity_of, self._parity_until_s = self.changes, self.valid_until_s(self.workers(), now_s)
        return self._parity

    def differences(self, workers: Iterable[Worker], now_s: float) -> dict[str, tuple[Disparity, ...]]:
        """Return for each of these workers the fields that differ, over all models that it serves."""

        @cache
        def rules(model: str) -> tuple[Hashing, ImageRule | None]:
            hashing = self.hashing(model, now_s)
            assert hashing is not None, "a worker serves the model"
            return hashing, self.images(model, now_s)

        return {
            each.worker_id: tuple(
                dict.fromkeys(one for name in each.served_names for one in self.disparities(worker, *rules(name)))
            )
            for worker in workers
            for each in (worker.registration,)
        }
