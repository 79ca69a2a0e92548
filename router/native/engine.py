"""What the reference engine needs, in seconds: learnt factors are multiples of it (`rates.hpp`).

A prompt takes `FIRST_S`, `PREFILL_TOKEN_S` a token, and `PREFILL_PAIR_S` an attention pair; a step `STEP_S`,
`STEP_SEQUENCE_S` a sequence, and `STEP_KV_TOKEN_S` a KV token. Source: `worker_agent/engines/simulated/timing.py`
(H200, 8B parameters) and the captures named there.
"""

from router.native import built

FIRST_S: float = built.FIRST_S
PREFILL_TOKEN_S: float = built.PREFILL_TOKEN_S
PREFILL_PAIR_S: float = built.PREFILL_PAIR_S
STEP_S: float = built.STEP_S
STEP_SEQUENCE_S: float = built.STEP_SEQUENCE_S
STEP_KV_TOKEN_S: float = built.STEP_KV_TOKEN_S
OUTPUT_TOKENS: float = built.OUTPUT_TOKENS
"""Of an answer, before any is known."""
