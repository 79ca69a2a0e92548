"""A synthetic trace: sessions with a few assistants, in prompts that grow with every turn.

    sessions begin     as a Poisson process, `session_rate` a second
    turns              geometric with mean `turns`; thinking in between is exponential with mean `think_s`
    prompt of turn k   the assistant's system prompt, then every question and answer before, then the question
    questions, answers exponential with means `question_tokens` and `answer_tokens`, 1 token or more

A turn's prompt has the ids of all full blocks of the turn before; the block that was partial then is another one now.
"""

import random
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from bench.routing.trace import TRACE_BLOCK_TOKENS, TraceRequest


class SyntheticShape(NamedTuple):
    """How many, how long, how often. System prompts are full blocks: `system_tokens` is rounded up to 512."""

    sessions: int = 600
    turns: float = 5.0
    systems: int = 8
    system_tokens: int = 4096
    question_tokens: float = 600.0
    answer_tokens: float = 250.0
    think_s: float = 20.0
    session_rate: float = 0.6


def synthetic_trace(shape: SyntheticShape, seed: int) -> list[TraceRequest]:
    """Return the same requests, in the order of arrival, for the same seed."""
    draw = random.Random(seed)  # noqa: S311 - a workload, not a secret
    fresh = count()
    system_blocks = -(-shape.system_tokens // TRACE_BLOCK_TOKENS)
    systems = [tuple(next(fresh) for _ in range(system_blocks)) for _ in range(shape.systems)]
    requests: list[TraceRequest] = []
    begins_s = 0.0
    for number in range(shape.sessions):
        turns = _session(shape, draw, fresh, draw.choice(systems), begins_s)
        requests += [turn._replace(session=f"s{number}") for turn in turns]
        begins_s += draw.expovariate(shape.session_rate)
    return sorted(requests, key=lambda request: request.arrival_s)


def _session(
    shape: SyntheticShape, draw: random.Random, fresh: Iterator[int], system: tuple[int, ...], begins_s: float
) -> Iterator[TraceRequest]:
    arrival_s, known, isl_tokens = begins_s, system, len(system) * TRACE_BLOCK_TOKENS
    while True:
        isl_tokens += _length(draw, shape.question_tokens)
        osl_tokens = _length(draw, shape.answer_tokens)
        missing = -(-isl_tokens // TRACE_BLOCK_TOKENS) - len(known)
        block_ids = known + tuple(next(fresh) for _ in range(missing))
        yield TraceRequest(arrival_s, isl_tokens, osl_tokens, block_ids)
        known = block_ids[: isl_tokens // TRACE_BLOCK_TOKENS]
        isl_tokens += osl_tokens
        arrival_s += draw.expovariate(1 / shape.think_s)
        if draw.random() * shape.turns < 1:
            return


def _length(draw: random.Random, mean: float) -> int:
    return max(1, round(draw.expovariate(1 / mean)))
