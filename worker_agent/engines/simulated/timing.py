"""How long a request is on its way to the engine, and how long an iteration lasts.

    request   = fixed q + prompt tokens * p                          before the engine, which computes meanwhile
    linear    = max(base b, tokens computed * t)                     reading the weights, or multiplying by them
    busy      = linear + attention pairs * a + KV tokens read * r + sequences beyond the knee * s
    iteration = max(busy, floor f if there is a context) + neighbours * busy * n
                + sequences decoded beside a context * m + tokens moved between GPU and host * h

A context of i tokens after k computed ones has i * (k + i / 2) attention pairs, so cutting a prompt into long chunks
costs nothing. Decoding is bound by memory: the weights, then the K/V of every sequence (`r`). An iteration with a
context runs without CUDA graphs, bound from below by the launching of kernels.

Neighbours are other engines (processes) on the same GPU that have work: they take turns on the GPU, so an engine waits
for them in proportion to what it computes itself. It launches kernels while it waits, so the floor is not stretched.
`n` is above 1 where it was fitted: changing between processes costs time.

The time before the engine (HTTP, parsing, block hashes) is no part of an iteration. A driver of a simulator in virtual
time adds `request_s`; an agent has a real front end instead.
"""

import msgspec


class IterationWork(msgspec.Struct, frozen=True, kw_only=True):
    """What one iteration of a rank computes.

    kv_tokens    tokens in the KV cache that the decoding sequences read
    host_tokens  tokens whose K/V was copied between GPU and host
    """

    context_tokens: int = 0
    attention_pairs: float = 0.0
    decode_sequences: int = 0
    kv_tokens: int = 0
    host_tokens: int = 0


class EngineTiming(msgspec.Struct, frozen=True, kw_only=True):
    """The constants of the formulas above, in seconds per request, iteration, token, pair or sequence."""

    request_base_s: float
    prompt_token_s: float
    base_s: float
    context_floor_s: float
    token_s: float
    attention_pair_s: float
    kv_token_s: float
    sequence_s: float
    sequences_knee: float
    mixed_sequence_s: float = 0.0
    neighbour_ratio: float = 1.0
    host_token_s: float = 2.9e-6
    """144 KiB at 50 GB/s, a copy's rate over PCIe 5.0 x16 in practice; not fitted. Copies never overlap computing."""

    def request_s(self, prompt_tokens: int) -> float:
        """Return how long a request is on its way before the engine can schedule it, cached or not."""
        return self.request_base_s + prompt_tokens * self.prompt_token_s

    def iteration_s(self, work: IterationWork, neighbours: int = 0) -> float:
        """Return the duration of an iteration that computes `work` beside `neighbours`, in engine seconds."""
        busy_s = (
            max(self.base_s, (work.context_tokens + work.decode_sequences) * self.token_s)
            + work.attention_pairs * self.attention_pair_s
            + work.kv_tokens * self.kv_token_s
            + max(0.0, work.decode_sequences - self.sequences_knee) * self.sequence_s
        )
        alone_s = busy_s
        if work.context_tokens:
            alone_s = max(busy_s, self.context_floor_s) + work.decode_sequences * self.mixed_sequence_s
        return alone_s + neighbours * self.neighbour_ratio * busy_s + work.host_tokens * self.host_token_s


H200_8B = EngineTiming(
    request_base_s=2.78e-3,
    prompt_token_s=1.37e-6,
    base_s=5.76e-3,
    context_floor_s=20.1e-3,
    token_s=22.8e-6,
    attention_pair_s=0.830e-9,
    kv_token_s=34.7e-9,
    sequence_s=20.4e-6,
    sequences_knee=63.6,
)
"""One H200 with an 8B model (bf16, 144 KiB of K/V per token), chunks not limited.

Source: fitted by `bench/fidelity/timings.py` to `captures/h200_calibration.json` (vLLM 0.24.0, Qwen3-8B). Relative
errors: TTFT median 2.8 %, worst 16.3 % (224 tokens after 1824 cached); ITL median 1.3 %, worst 6.3 % (batch 8).
`docs/FIDELITY.md` compares a fleet of such engines with a recorded one; its other engines are in
`bench/fidelity/timings.py`.
"""
