"""The duration of KV transfers from a prefill to a decode engine, and where they queue.

    duration   latency + tokens * bytes of a token / bandwidth
    buffer     each engine has one, of `buffer_tokens` tokens; a transfer reserves space for all its tokens, first in
               the receiver's, then in the sender's, at once and in the order of requests, until it is over
    too long   a transfer longer than the buffer waits for space that never comes; no transfer behind it gets space
               before its timeout

So a buffer below the longest input stops both engines under load: transfers that wait for the buffer hold the sender's
blocks, and requests that wait for these transfers hold the receiver's. Only the timeout ends it.

    outcome    done      all tokens have come
               stalled   the buffer is too small for it
               timeout   it waited or took too long
               gone      the sender does not hold it: fetched, given up, or never handed over
               lost      the sender does not answer

Assumed: the first transfer blocks the queue. Source: `docs/SOURCES.md` D4.2; NVIDIA Dynamo's documentation,
TensorRT-LLM, "Known Issues and Mitigations" (KV cache exhaustion); NVIDIA/TensorRT-LLM, `cacheFormatter.cpp` (with an
agent the buffer has to cover a whole transfer); 60 s: `kv_transfer_timeout_ms` (`SURFACE.md` of the fake).
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Literal

import msgspec
from blake3 import blake3

from worker_agent.engines.simulated.layout import KV_TOKEN_BYTES

TransferOutcome = Literal["done", "stalled", "timeout", "gone", "lost"]
OUTCOMES: tuple[TransferOutcome, ...] = ("done", "stalled", "timeout", "gone", "lost")
_STATE = b"simulated-kv:"


class TransferRules(msgspec.Struct, frozen=True, kw_only=True):
    """The constants of the rules above. `buffer_tokens` None: a buffer that is never too small.

    400 Gbit/s is one InfiniBand NDR port, a GPU's share in a DGX H100; 1 ms for setting a transfer up is assumed.
    """

    token_bytes: int = KV_TOKEN_BYTES
    bandwidth_bytes_s: float = 50e9
    latency_s: float = 1e-3
    buffer_tokens: int | None = None
    timeout_s: float = 60.0

    def duration_s(self, tokens: int) -> float:
        """Return the transfer time of so many tokens, in engine seconds."""
        return self.latency_s + tokens * self.token_bytes / self.bandwidth_bytes_s

    def too_late(self, tokens: int) -> TransferOutcome:
        """Return the outcome of a transfer that timed out."""
        is_stalled = self.buffer_tokens is not None and tokens > self.buffer_tokens
        return "stalled" if is_stalled else "timeout"


UNBOUNDED = TransferRules()
"""The default network, and an unbounded buffer."""


class Fetch(msgspec.Struct, frozen=True, kw_only=True):
    """A decode engine's fetch for a request: `tokens` of the context that `endpoint` holds as `transfer_id`.

    `state` is from the prefill engine's handoff; without it the context is not sent.
    """

    request_id: str
    transfer_id: int
    state: bytes
    tokens: int
    endpoint: str


class TransferStatistics(msgspec.Struct, kw_only=True):
    """An engine's transfers: contexts held for others, requests that wait for KV, and counts since start.

    `expired_total`: contexts not fetched in time. `fetches_total`: by outcome. Seconds are the engine's.
    """

    held: int = 0
    held_tokens: int = 0
    fetching: int = 0
    handed_over_total: int = 0
    expired_total: int = 0
    fetches_total: dict[TransferOutcome, int] = msgspec.field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    fetched_bytes_total: int = 0
    fetch_seconds_total: float = 0.0


def state_of(prompt: Sequence[int], transfer_id: int) -> bytes:
    """Return the state in a context's handoff, which identifies its prompt and its transfer."""
    encoded = msgspec.msgpack.encode((transfer_id, tuple(prompt)))
    return _STATE + blake3(encoded).digest()


class TransferBuffer:
    """The space of one engine's buffer, and the transfers that wait for it. A key identifies a transfer."""

    def __init__(self, tokens: int | None) -> None:
        self._tokens = tokens
        self._waiting: OrderedDict[Hashable, int] = OrderedDict()
        self._granted_tokens: dict[Hashable, int] = {}
        self.used_tokens = 0
        """How many tokens are reserved."""

    @property
    def waiting(self) -> int:
        """How many transfers wait, including one that is too long for the buffer."""
        return len(self._waiting)

    def request(self, key: Hashable, tokens: int) -> list[Hashable]:
        """Queue a transfer; return the transfers that get their space now."""
        self._waiting[key] = tokens
        return self._granted()

    def release(self, key: Hashable) -> list[Hashable]:
        """Remove a transfer, waiting or not; return the transfers that get their space now."""
        self._waiting.pop(key, None)
        self.used_tokens -= self._granted_tokens.pop(key, 0)
        return self._granted()

    def _granted(self) -> list[Hashable]:
        granted: list[Hashable] = []
        while self._waiting:
            key, tokens = next(iter(self._waiting.items()))
            if self._tokens is not None and self.used_tokens + tokens > self._tokens:
                break
            del self._waiting[key]
            self._granted_tokens[key] = tokens
            self.used_tokens += tokens
            granted.append(key)
        return granted
