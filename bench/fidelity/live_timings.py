"""The timings of the engines whose live fleets were recorded (`docs/FIDELITY.md`), beside the agent's default."""

import msgspec

from worker_agent.engines.simulated.timing import H200_8B

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
