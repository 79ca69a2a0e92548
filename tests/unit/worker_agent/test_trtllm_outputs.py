"""From all that the engine says so far to what is new."""

from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_agent.engines.trtllm.outputs import Outputs, finish_reason
from worker_agent.port.sampling import Sampling, TokenLogprob, TokenLogprobs
from worker_agent.port.types import EngineRequest, FinishReason, KvFetches

PROMPT = (1, 2, 3, 4)
LONGEST = 100


@dataclass
class Said:
    """One sequence, as the library's `CompletionOutput`."""

    index: int = 0
    token_ids: list[int] | None = field(default_factory=list)
    logprobs: Any = field(default_factory=list)
    prompt_logprobs: Any = field(default_factory=list)
    finish_reason: str | None = None
    disaggregated_params: Any = None
    request_perf_metrics: Any = None


@dataclass
class Result:
    """A result, as the library's `RequestOutput`."""

    outputs: list[Said]
    cached_tokens: int = 0
    finished: bool = False


def logprob(value: float, rank: int) -> Any:
    return SimpleNamespace(logprob=value, rank=rank)


def outputs_of(*, max_tokens: int = LONGEST, transfers: KvFetches | None = None, **sampling: Any) -> Outputs:
    asked = EngineRequest(request_id="r", prompt=PROMPT, max_tokens=max_tokens, sampling=Sampling(**sampling))
    return Outputs(asked, transfers=transfers)


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=6))
def test_the_parts_together_are_the_whole(chunks: list[list[int]]) -> None:
    outputs, said, told = outputs_of(), Said(), []
    for chunk in chunks:
        assert said.token_ids is not None
        said.token_ids.extend(chunk)
        told += [token for output in outputs.new(Result([said])) for token in output.token_ids]
    assert told == [token for chunk in chunks for token in chunk]
    assert outputs.has_begun == any(chunks)


def test_nothing_new_is_no_output() -> None:
    outputs, said = outputs_of(), Said(token_ids=[7])
    assert len(outputs.new(Result([said]))) == 1
    assert outputs.new(Result([said])) == []


def test_a_stop_word_that_the_engine_cuts_off_again_takes_nothing_back() -> None:
    outputs, said = outputs_of(), Said(token_ids=[7, 8])
    outputs.new(Result([said]))
    (last,) = outputs.new(Result([Said(token_ids=[7], finish_reason="stop")], finished=True))
    assert (last.token_ids, last.finish_reason, outputs.is_over) == ((), "stop", True)


def test_choices_end_one_by_one() -> None:
    outputs = outputs_of(choices=2)
    first = outputs.new(Result([Said(0, [5], finish_reason="length"), Said(1, [6])]))
    assert [(each.choice, each.finish_reason) for each in first] == [(0, "length"), (1, None)]
    assert not outputs.is_over
    (second,) = outputs.new(Result([Said(0, [5], finish_reason="length"), Said(1, [6, 7], finish_reason="stop")]))
    assert (second.choice, second.token_ids, outputs.is_over) == (1, (7,), True)


@pytest.mark.parametrize(
    ("said", "ours"),
    [
        (None, None),
        ("stop", "stop"),
        ("length", "length"),
        ("not_finished", "length"),
        ("timeout", "error"),
        ("something new", "error"),
    ],
)
def test_finish_reasons(said: str | None, ours: FinishReason | None) -> None:
    assert finish_reason(said) == ours


def test_choices_that_ended_before_the_last_have_no_reason_of_the_engine() -> None:
    outputs = outputs_of(max_tokens=2, choices=4)
    said = [Said(0, [5, 6]), Said(1, [5]), Said(2, []), Said(3, [5, 6], finish_reason="length")]
    assert [each.finish_reason for each in outputs.new(Result(said[:2]))] == [None, None]
    told = outputs.new(Result(said, finished=True))
    assert [(each.choice, each.token_ids, each.finish_reason) for each in told] == [
        (0, (), "length"),
        (1, (), "stop"),
        (2, (), "error"),
        (3, (5, 6), "length"),
    ]
    assert outputs.is_over


def test_a_cancelled_request_has_no_output() -> None:
    outputs = outputs_of()
    assert outputs.new(Result([Said(token_ids=[7], finish_reason="cancelled")], finished=True)) == []
    assert outputs.is_cancelled


def test_a_failure_ends_every_open_choice_and_keeps_the_usage() -> None:
    outputs = outputs_of(choices=3)
    outputs.new(Result([Said(0, [5], finish_reason="length"), Said(1, [6])], cached_tokens=3))
    told = outputs.failed()
    assert [(each.choice, each.finish_reason, each.cached_tokens) for each in told] == [
        (1, "error", 3),
        (2, "error", 3),
    ]
    assert outputs.is_over


@pytest.mark.parametrize(("said", "told"), [(0, 0), (3, 3), (9, 4)])
def test_cached_tokens_are_the_prompt_s_at_most(said: int, told: int) -> None:
    (output,) = outputs_of().new(Result([Said(token_ids=[7])], cached_tokens=said))
    assert output.cached_tokens == told


@pytest.mark.parametrize("moved", [4096, 0])
def test_a_measured_transfer_is_counted_once(moved: int) -> None:
    timing = SimpleNamespace(
        kv_cache_size=moved, kv_cache_transfer_start=timedelta(seconds=2), kv_cache_transfer_end=timedelta(seconds=2.25)
    )
    perf, transfers = SimpleNamespace(timing_metrics=timing), KvFetches("done")
    outputs = outputs_of(transfers=transfers)
    for count in (1, 2):
        outputs.new(Result([Said(token_ids=[7] * count, request_perf_metrics=perf)]))
    assert (transfers.by_outcome["done"], transfers.fetched_bytes, transfers.seconds) == (
        (1, 4096, 0.25) if moved else (0, 0, 0.0)
    )


def test_log_probabilities_stand_at_their_tokens_best_first() -> None:
    outputs = outputs_of(logprobs=1)
    said = Said(token_ids=[7], logprobs=[{9: logprob(-0.1, 1), 7: logprob(-3.0, 2)}])
    (output,) = outputs.new(Result([said]))
    chosen, best = TokenLogprob(token_id=7, logprob=-3.0, rank=2), TokenLogprob(token_id=9, logprob=-0.1, rank=1)
    assert output.logprobs == (TokenLogprobs(chosen=chosen, top=(best,)),)


def test_a_place_of_which_nothing_is_known_stays_empty() -> None:
    said = Said(token_ids=[7, 8, 9], logprobs=[{1: logprob(-1.0, 1)}, -0.5])
    (output,) = outputs_of(logprobs=0).new(Result([said]))
    assert output.logprobs == (None, TokenLogprobs(chosen=TokenLogprob(token_id=8, logprob=-0.5)), None)


def test_without_a_wish_there_are_no_log_probabilities() -> None:
    (output,) = outputs_of().new(Result([Said(token_ids=[7], logprobs=[{7: logprob(-1.0, 1)}])]))
    assert output.logprobs == ()
