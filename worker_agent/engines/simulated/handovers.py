"""The handover of computed prompts between simulated engines: what is held, how long a transfer takes, how it ends.

A context is a computed prompt with its blocks. A prefill engine holds it until its KV was fetched, or until it
expires. The name of a context is the request's `transfer_id`, or the engine's next free number. A decode engine fetches
the KV of the tokens that it has not cached, then begins to decode.

    duration   latency + tokens * bytes of a token / bandwidth

    outcome    done      all tokens have come
               timeout   it took too long
               gone      the prefill engine does not hold it: fetched, expired, or never handed over
               lost      the prefill engine does not answer, or gives another answer

Source: `docs/SOURCES.md` D4.2; 60 s: `kv_transfer_timeout_ms` (`SURFACE.md` of the fake).
"""

import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec
from blake3 import blake3

from worker_agent.engines.simulated.blocks import BlockTable
from worker_agent.engines.simulated.scheduling import Generation
from worker_agent.port.handoff import Handoff
from worker_agent.port.sampling import TokenLogprobs
from worker_agent.port.types import EngineRequest, Rule

TransferOutcome = Literal["done", "timeout", "gone", "lost"]
OUTCOMES: tuple[TransferOutcome, ...] = ("done", "timeout", "gone", "lost")
_STATE = b"simulated-kv:"
HOST = "127.0.0.1"
ENDPOINT = re.compile(rf"http://{re.escape(HOST)}:[0-9]{{1,5}}")
"""The addresses from which an engine fetches contexts: engines on the same machine."""
KV_TOKEN_BYTES = 144 * 1024
"""K/V of one token in all layers: 36 layers, 8 heads of 128, keys and values, bf16. The model of `timing.H200_8B`."""


class TransferRules(msgspec.Struct, frozen=True, kw_only=True):
    """The constants of a transfer's duration, and its timeout.

    400 Gbit/s is one InfiniBand NDR port, a GPU's share in a DGX H100; 1 ms for setting a transfer up is assumed.
    """

    token_bytes: int = KV_TOKEN_BYTES
    bandwidth_bytes_s: float = 50e9
    latency_s: float = 1e-3
    timeout_s: float = 60.0

    def duration_s(self, tokens: int) -> float:
        """Return the transfer time of this many tokens, in engine seconds."""
        return self.latency_s + tokens * self.token_bytes / self.bandwidth_bytes_s


NETWORK = TransferRules()
"""The default network."""


def state_of(prompt: Sequence[int], transfer_id: int) -> bytes:
    """Return the state in a context's handoff, which identifies its prompt and its transfer."""
    encoded = msgspec.msgpack.encode((transfer_id, tuple(prompt)))
    return _STATE + blake3(encoded).digest()


class HeldContext(NamedTuple):
    """A computed prompt, its blocks at a rank (None: the only one), and the state that a fetch must present."""

    dp_rank: int | None
    table: BlockTable
    prompt: tuple[int, ...]
    state: bytes
    until_s: float


class HeldContexts:
    """The contexts of all ranks of one engine; the ranks' blocks bound their number."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._held: dict[int, HeldContext] = {}
        self._number = 0
        self.handed_over_total = self.expired_total = 0
        self.endpoint: str | None = None
        """The address from which contexts are fetched, for handoffs; None until it is known."""

    def __len__(self) -> int:
        return len(self._held)

    @property
    def tokens(self) -> int:
        """How many tokens' KV is held."""
        return sum(len(each.prompt) for each in self._held.values())

    @property
    def next_expiry_s(self) -> float | None:
        """When the next context expires, in engine seconds; None if none is held."""
        return min((each.until_s for each in self._held.values()), default=None)

    def count_at(self, dp_rank: int | None) -> int:
        """Return how many contexts a rank holds."""
        return sum(each.dp_rank == dp_rank for each in self._held.values())

    def hold(
        self,
        running: Generation,
        logprobs: tuple[TokenLogprobs | None, ...],
        now_s: float,
        dp_rank: int | None,
    ) -> Handoff:
        """Hold a computed prompt's blocks under a name that is not in use; return its handoff, with the first token."""
        request = running.request
        name = request.transfer_id
        while name is None or name in self._held:
            self._number += 1
            name = self._number
        state = state_of(request.prompt, name)
        self._held[name] = HeldContext(dp_rank, running.table, request.prompt, state, now_s + self._timeout_s)
        top_logprobs = [each.top or (each.chosen,) for each in logprobs if each is not None]
        return Handoff(
            request_type="context_only",
            first_gen_tokens=(running.tokens[-1],),
            first_gen_log_probs=tuple(top_logprobs) or None,
            ctx_request_id=name,
            disagg_request_id=request.transfer_id,
            opaque_state=state,
            ctx_dp_rank=dp_rank,
            ctx_info_endpoint=self.endpoint,
        )

    def fetched(self, name: int, state: bytes) -> HeldContext | None:
        """Remove and return a context; the caller releases its blocks. None: none with this name and state is held."""
        held = self._held.get(name)
        if held is None or held.state != state:
            return None
        self.handed_over_total += 1
        return self._held.pop(name)

    def expired(self, now_s: float) -> list[HeldContext]:
        """Remove and return the contexts that were not fetched in time; the caller releases their blocks."""
        late = [name for name, each in self._held.items() if each.until_s <= now_s]
        self.expired_total += len(late)
        return [self._held.pop(name) for name in late]


def handed_over(running: Generation) -> tuple[int, ...]:
    """Return the first token of the answer, which the prefill engine generated."""
    handoff = running.request.handoff
    return (handoff and handoff.first_gen_tokens) or ()


def first_logprobs(running: Generation) -> tuple[TokenLogprobs | None, ...]:
    """Return the log probabilities of the token that was handed over; () if there is none, or none are wanted."""
    top, handoff = running.request.sampling.logprobs, running.request.handoff
    if top is None or handoff is None:
        return ()
    (token,), reported = handed_over(running), handoff.first_gen_log_probs
    alternatives = reported[0] if reported and isinstance(reported[0], tuple) else ()
    chosen = next((each for each in alternatives if each.token_id == token), None)
    return (None if chosen is None else TokenLogprobs(chosen=chosen, top=alternatives[:top]),)


def handoff_rules(request: EngineRequest) -> Iterator[Rule]:
    """Yield the rules for a handoff: only a simulated prefill engine can have made it, and only for this prompt."""
    handoff, field = request.handoff, "disaggregated_params"
    assert handoff is not None
    tokens, name, endpoint = handoff.first_gen_tokens or (), handoff.ctx_request_id, handoff.ctx_info_endpoint
    n = request.sampling.choices
    yield "n", n, "1 beside a handoff: a context is fetched once", n == 1
    yield f"{field}.first_gen_tokens", tokens, "one token: prefill engines of this kind make one", len(tokens) == 1
    yield f"{field}.ctx_request_id", name, "the prefill engine's name of the context", name is not None
    is_here = endpoint is not None and ENDPOINT.fullmatch(endpoint) is not None
    yield f"{field}.ctx_info_endpoint", endpoint, f"a prefill engine's: http://{HOST}:port", is_here
    is_ours = name is not None and handoff.opaque_state == state_of(request.prompt, name)
    yield f"{field}.encoded_opaque_state", "another", "a simulated prefill engine's state of this prompt", is_ours
