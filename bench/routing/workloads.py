"""Made-up workloads: requests that come by themselves, and requests that follow the answer to another.

open       requests come at their times, whatever the fleet does (`synthetic_trace`)
closed     a session asks, waits for the answer, thinks and asks again; after its end the next one begins
"""

import random
from collections.abc import Iterator
from itertools import count, pairwise
from typing import NamedTuple

from bench.routing.trace import TRACE_BLOCK_TOKENS, TraceRequest
from bench.routing.virtual_fleet import FollowUp, FollowUps


class Agents(NamedTuple):
    """How many sessions are at work at a time and in all, and what each of their turns is made of.

    Each session begins with one of `systems` system prompts. After the answer to a turn, `tool_calls` requests with the
    turn's context are sent at once, each with a result of its own; the next turn follows the answer to the first.
    """

    sessions: int = 400
    concurrent: int = 48
    turns: int = 8
    think_s: float = 1.0
    system_tokens: int = 8192
    turn_tokens: float = 768.0
    answer_tokens: float = 128.0
    systems: int = 1
    tool_calls: int = 0


class Workload(NamedTuple):
    """Requests that come by themselves, and those that follow the answer to another."""

    requests: list[TraceRequest]
    follow_ups: FollowUps


def agents(shape: Agents, seed: int) -> Workload:
    """Return the same sessions for the same seed; `concurrent` begin at once, each end lets another one begin."""
    draw = random.Random(seed)  # noqa: S311 - a workload, not a secret
    fresh = count()
    systems = [blocks(fresh, shape.system_tokens) for _ in range(shape.systems)]
    lanes = [
        [
            turn
            for number in range(lane, shape.sessions, shape.concurrent)
            for turn in _session(shape, draw, fresh, draw.choice(systems) if shape.systems > 1 else systems[0], number)
        ]
        for lane in range(min(shape.concurrent, shape.sessions))
    ]
    follow_ups: dict[tuple[int, ...], list[FollowUp]] = {}
    for lane_turns in lanes:
        for before, then in pairwise(lane_turns):
            calls = [
                following(draw, fresh, full_blocks(before), shape.turn_tokens, shape.answer_tokens)
                for _ in range(shape.tool_calls)
            ]
            calls = [call._replace(session=before.session) for call in calls]
            follow_ups[before.block_ids] = [FollowUp(0.0, call) for call in calls]
            asks_on_after = calls[0] if calls else before
            think_s = draw.expovariate(1 / shape.think_s) if shape.think_s else 0.0
            follow_ups.setdefault(asks_on_after.block_ids, []).append(FollowUp(think_s, then))
    first = [lane[0]._replace(arrival_s=draw.random() * shape.think_s) for lane in lanes]
    return Workload(sorted(first, key=lambda request: request.arrival_s), follow_ups)


def _session(
    shape: Agents, draw: random.Random, fresh: Iterator[int], system: tuple[int, ...], number: int
) -> Iterator[TraceRequest]:
    known = system
    for _ in range(shape.turns):
        request = following(draw, fresh, known, shape.turn_tokens, shape.answer_tokens)
        yield request._replace(session=f"s{number}")
        known = full_blocks(request)


def blocks(fresh: Iterator[int], tokens: int) -> tuple[int, ...]:
    """Return new block ids for this many tokens."""
    return tuple(next(fresh) for _ in range(-(-tokens // TRACE_BLOCK_TOKENS)))


def full_blocks(request: TraceRequest) -> tuple[int, ...]:
    """Return the ids of the prompt's full blocks."""
    return request.block_ids[: request.isl_tokens // TRACE_BLOCK_TOKENS]


def following(
    draw: random.Random, fresh: Iterator[int], known: tuple[int, ...], own: float, answer: float
) -> TraceRequest:
    """Return a request at time 0: the `known` blocks, then its own tokens; `own` and `answer` are mean lengths."""
    own_tokens = length(draw, own)
    block_ids = (*known, *blocks(fresh, own_tokens))
    isl_tokens = len(known) * TRACE_BLOCK_TOKENS + own_tokens
    return TraceRequest(0.0, isl_tokens, length(draw, answer), block_ids)


def length(draw: random.Random, mean: float) -> int:
    """Return an exponential length, 1 or more."""
    return max(1, round(draw.expovariate(1 / mean)))


class SyntheticShape(NamedTuple):
    """Sizes and rates of a synthetic trace. System prompts are full blocks: `system_tokens` is rounded up.

    Sessions begin as a Poisson process, `session_rate` a second, each with one of `systems` system prompts. Their turns
    are geometric with mean `turns`; lengths, and thinking in between, are exponential with the means in the fields. A
    turn's prompt has all questions and answers before it; a block that was partial before is a new block.
    """

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
    systems = [blocks(fresh, shape.system_tokens) for _ in range(shape.systems)]
    requests: list[TraceRequest] = []
    begins_s = 0.0
    for number in range(shape.sessions):
        turns = _conversation(shape, draw, fresh, draw.choice(systems), begins_s)
        requests += [turn._replace(session=f"s{number}") for turn in turns]
        begins_s += draw.expovariate(shape.session_rate)
    return sorted(requests, key=lambda request: request.arrival_s)


def _conversation(
    shape: SyntheticShape, draw: random.Random, fresh: Iterator[int], system: tuple[int, ...], begins_s: float
) -> Iterator[TraceRequest]:
    arrival_s, known, isl_tokens = begins_s, system, len(system) * TRACE_BLOCK_TOKENS
    while True:
        isl_tokens += length(draw, shape.question_tokens)
        osl_tokens = length(draw, shape.answer_tokens)
        block_ids = known + blocks(fresh, isl_tokens - len(known) * TRACE_BLOCK_TOKENS)
        request = TraceRequest(arrival_s, isl_tokens, osl_tokens, block_ids)
        yield request
        known = full_blocks(request)
        isl_tokens += osl_tokens
        arrival_s += draw.expovariate(1 / shape.think_s)
        if draw.random() * shape.turns < 1:
            return
