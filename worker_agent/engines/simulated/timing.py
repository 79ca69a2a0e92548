"""How long a request is on its way to the engine, and how long an iteration lasts.

    request   = fixed q + prompt tokens * p                          before the engine, which computes meanwhile
    linear    = max(base b, tokens computed * t)                     reading the weights, or multiplying by them
    busy      = linear + attention pairs * a + KV tokens read * r + sequences beyond the knee * s
    iteration = max(busy, floor f, where there is a context) + neighbours * busy * n
                + sequences decoded beside a context * m + tokens moved between GPU and host * h

A context of n tokens after p computed ones has n * (p + n / 2) attention pairs, so cutting a prompt into long chunks
costs nothing. Decoding is bound by memory: the weights, then the K/V of every sequence (`r`). An iteration with a
context runs without CUDA graphs, bound from below by the launching of kernels.

Neighbours are other engines (processes) on the same GPU that have work: the GPU gives each a slice of time after the
other, so an engine waits for them in proportion to what it computes itself. It launches kernels meanwhile: the floor is
not stretched. `n` above 1 is what changing between processes costs.

The time before the engine (HTTP, parsing, block hashes) is no part of an iteration. A driver of a simulator in virtual
time adds `request_s`; an agent has a real front end instead.
"""

import msgspec


class IterationWork(msgspec.Struct, frozen=True, kw_only=True):
    """What one iteration of a rank computes.

    `kv_tokens` are those that the decoding sequences read, `host_tokens` those whose K/V moved between GPU and host.
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

Source: fitted by `bench/fidelity/fit_timing.py` to `captures/h200_calibration.json` (vLLM 0.24.0, Qwen3-8B). Relative
errors: TTFT median 2.8 %, worst 16.3 % (224 tokens after 1824 cached); ITL median 1.3 %, worst 6.3 % (batch 8). How a
fleet of such engines compares with a recorded one: `docs/FIDELITY.md`.
"""

H200_8B_MIXED = msgspec.structs.replace(H200_8B, mixed_sequence_s=300e-6)
"""The same, where decoding beside a context costs what it does in a served engine.

Source: `mixed_sequence_s` is fitted to two of the three placements of `captures/h200_fleet_light.json`, round robin and
sticky; the calibration has contexts alone, and decoding alone. `H200_8B` stays without it: the figures of
`docs/BENCHMARKS.md` were made so.
"""

H200_4B = msgspec.structs.replace(H200_8B_MIXED, base_s=2.8e-3, token_s=11.1e-6, neighbour_ratio=1.4)
"""The same GPU with a 4B model (bf16, 144 KiB of K/V per token), alone or beside other engines on it.

Reading the weights and multiplying by them is scaled by the number of weights, 3.69 to 7.57 billion; attention and
floor are the 8B model's, with as many layers and heads. `neighbour_ratio` alone was fitted to live engines: to the runs
kv and round robin with large caches of four vLLM engines on one H200. How it fares on the others: `docs/FIDELITY.md`.
"""

H100_4B_SGLANG = msgspec.structs.replace(
    H200_4B,
    request_base_s=4.3e-3,
    base_s=4.0e-3,
    token_s=16.2e-6,
    attention_pair_s=1.71e-9,
    kv_token_s=44.7e-9,
    context_floor_s=29.8e-3,
    mixed_sequence_s=0.0,
    neighbour_ratio=1.49,
)
"""One H100 with the 4B model on SGLang 0.5.14 (attention by Triton, prompts without CUDA graphs), beside others on it.

Fitted to the runs kv and round robin with large caches of `captures/h100_sglang_live.json`, by a random search over
logarithms of the figures. How it fares on the others: `docs/FIDELITY.md`.
"""
