"""Small traces, of which a test names only what it is about."""

import random

from bench.routing.trace import TRACE_BLOCK_TOKENS, TraceRequest


def request(arrival_s: float, *block_ids: int, short_by: int = 0, osl_tokens: int = 4) -> TraceRequest:
    """Return a request for these blocks, the last of which lacks `short_by` tokens."""
    return TraceRequest(arrival_s, len(block_ids) * TRACE_BLOCK_TOKENS - short_by, osl_tokens, block_ids)


def random_trace(seed: int, requests: int = 40, per_s: float = 4.0) -> list[TraceRequest]:
    """Return a trace of prompts that share beginnings and differ in their ends, the same for the same seed."""
    draw = random.Random(seed)
    trace: list[TraceRequest] = []
    arrival_s, fresh = 0.0, 100
    for _ in range(requests):
        arrival_s += draw.expovariate(per_s)
        family = draw.randrange(4)
        shared = tuple(10 * family + depth for depth in range(draw.randrange(5)))
        own = tuple(range(fresh, fresh + draw.randrange(1, 4)))
        fresh += len(own)
        short_by = draw.choice((0, 1, draw.randrange(TRACE_BLOCK_TOKENS)))
        trace.append(request(arrival_s, *shared, *own, short_by=short_by, osl_tokens=draw.randrange(1, 300)))
    return trace
