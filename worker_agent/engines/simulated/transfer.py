"""The duration of KV transfers from a prefill to a decode engine, and how they end.

    duration   latency + tokens * bytes of a token / bandwidth

    outcome    done      all tokens have come
               timeout   it took too long
               gone      the sender does not hold it: fetched, given up, or never handed over
               lost      the sender does not answer

Source: `docs/SOURCES.md` D4.2; 60 s: `kv_transfer_timeout_ms` (`SURFACE.md` of the fake).
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
from blake3 import blake3

TransferOutcome = Literal["done", "timeout", "gone", "lost"]
OUTCOMES: tuple[TransferOutcome, ...] = ("done", "timeout", "gone", "lost")
_STATE = b"simulated-kv:"
KV_TOKEN_BYTES = 144 * 1024
"""K/V of one token in all layers: 36 layers, 8 heads of 128, keys and values, bf16. The model of `timing.H200_8B`."""


class TransferRules(msgspec.Struct, frozen=True, kw_only=True):
    """The constants of the rules above.

    400 Gbit/s is one InfiniBand NDR port, a GPU's share in a DGX H100; 1 ms for setting a transfer up is assumed.
    """

    token_bytes: int = KV_TOKEN_BYTES
    bandwidth_bytes_s: float = 50e9
    latency_s: float = 1e-3
    timeout_s: float = 60.0

    def duration_s(self, tokens: int) -> float:
        """Return the transfer time of so many tokens, in engine seconds."""
        return self.latency_s + tokens * self.token_bytes / self.bandwidth_bytes_s


NETWORK = TransferRules()
"""The default network."""


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
