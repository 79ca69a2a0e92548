"""How long an iteration lasts.

    busy     = base + context tokens * c + attention pairs * a + KV tokens read * r + sequences beyond the knee * s
    duration = max(busy, floor, where there is a context) + cached tokens taken up * k

A context of n tokens after p computed ones has n * (p + n / 2) attention pairs, so cutting a prompt into chunks adds
only `base` per chunk. Decoding is bound by memory: the weights (`base`), then the K/V of every sequence (`r`), and
beyond the knee also by arithmetic (`s`). An iteration with a context runs without CUDA graphs, bound from below by the
launching of kernels (`floor`). A cached token costs the host its lookup (`k`), once, when the request is admitted.
"""

import msgspec


class IterationWork(msgspec.Struct, frozen=True, kw_only=True):
    """What one iteration of a rank computes; `kv_tokens` are those that the decoding sequences read."""

    context_tokens: int = 0
    attention_pairs: float = 0.0
    cached_tokens: int = 0
    decode_sequences: int = 0
    kv_tokens: int = 0


class EngineTiming(msgspec.Struct, frozen=True, kw_only=True):
    """The constants of the formula above, in seconds per iteration, token, pair or sequence."""

    base_s: float
    context_floor_s: float
    context_token_s: float
    attention_pair_s: float
    cached_token_s: float
    kv_token_s: float
    sequence_s: float
    sequences_knee: float

    def iteration_s(self, work: IterationWork) -> float:
        """Return the duration of an iteration that computes `work`, in engine seconds."""
        busy_s = (
            self.base_s
            + work.context_tokens * self.context_token_s
            + work.attention_pairs * self.attention_pair_s
            + work.kv_tokens * self.kv_token_s
            + max(0.0, work.decode_sequences - self.sequences_knee) * self.sequence_s
        )
        floor_s = self.context_floor_s if work.context_tokens else 0.0
        return max(busy_s, floor_s) + work.cached_tokens * self.cached_token_s


H200_8B = EngineTiming(
    base_s=5.7e-3,
    context_floor_s=23.3e-3,
    context_token_s=22.6e-6,
    attention_pair_s=0.9309e-9,
    cached_token_s=1.149e-6,
    kv_token_s=35.98e-9,
    sequence_s=19.2e-6,
    sequences_knee=64,
)
"""One H200 with an 8B model (bf16, 144 KiB of K/V per token), chunks not limited.

Source: fitted by `bench/fit_timing.py` to `captures/h200_calibration.json` (vLLM 0.24.0, Qwen3-8B dimensions). Relative
errors: TTFT median 3.0 %, worst 17.2 % (224 tokens after 1824 cached); ITL median 1.1 %, worst 7.1 % (batch 8).
"""
