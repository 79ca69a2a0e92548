"""Logits processors, called as the engine calls them, on numpy arrays."""

import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest

from worker_agent.engines.trtllm.logits import LogitsAdapter, factory_at
from worker_agent.port.types import EngineError

HERE = "tests.unit.worker_agent.logits_processors"
NAMED = {"seven": f"{HERE}:only_seven", "broken": f"{HERE}:broken"}


def logits(*shape: int) -> Any:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


class Processors:
    """Adapters by name, and their errors."""

    def __init__(self) -> None:
        self.errors_total = Counter(dict.fromkeys(NAMED, 0))

    def adapters(self, names: list[str]) -> list[LogitsAdapter]:
        return [LogitsAdapter(name, NAMED[name], self.errors_total) for name in names]


def called(adapters: list[LogitsAdapter], array: Any, tokens: list[list[int]]) -> Any:
    for adapter in adapters:
        adapter(1, array, tokens, None, None)
    return array


def test_a_processor_gets_one_sequence_s_row_and_changes_it_in_place() -> None:
    processors = Processors()
    array = called(processors.adapters(["seven"]), logits(1, 1, 9), [[1, 2]])
    assert array[0, 0].tolist() == [0.0] * 7 + [100.0, 0.0]
    assert processors.errors_total == {"seven": 0, "broken": 0}


def test_an_error_leaves_the_logits_as_they_were_and_the_next_processor_runs() -> None:
    processors = Processors()
    assert (called(processors.adapters(["broken"]), logits(1, 1, 9), [[1]]) == logits(1, 1, 9)).all()
    assert called(processors.adapters(["broken", "seven"]), logits(1, 1, 9), [[1]])[0, 0, 7] == 100.0
    assert processors.errors_total == {"seven": 0, "broken": 2}


@pytest.mark.parametrize(
    ("shape", "tokens"), [((2, 1, 9), [[1]]), ((1, 2, 9), [[1], [1]]), ((1, 1, 9), [[1], [2]]), ((9,), [[1]])]
)
def test_several_requests_or_beams_are_left_unchanged(shape: tuple[int, ...], tokens: list[list[int]]) -> None:
    processors = Processors()
    assert (called(processors.adapters(["seven"]), logits(*shape), tokens) == logits(*shape)).all()
    assert processors.errors_total["seven"] == 1


def test_a_stream_without_torch_is_an_error_like_another() -> None:
    processors = Processors()
    (adapter,) = processors.adapters(["seven"])
    array = logits(1, 1, 9)
    adapter(1, array, [[1]], 0xDEAD, None)
    assert (array == logits(1, 1, 9)).all()
    assert processors.errors_total["seven"] == 1


def test_what_the_engine_is_handed_can_go_to_another_process() -> None:
    (adapter,) = Processors().adapters(["seven"])
    copied = pickle.loads(pickle.dumps(adapter))  # noqa: S301  as the engine does; our own bytes
    assert called([copied], logits(1, 1, 9), [[1]])[0, 0, 7] == 100.0


@pytest.mark.parametrize(
    ("specification", "says"),
    [
        ("no_colon", "allowed package.module:factory"),
        ("no.such.module:f", "cannot be loaded"),
        (f"{HERE}:missing", "cannot be loaded"),
        (f"{HERE}:NUMBER", "which is a int"),
    ],
)
def test_a_name_that_leads_nowhere_is_found_before_anything_is_served(specification: str, says: str) -> None:
    with pytest.raises(EngineError, match=rf"^logits_processors\.mine: found '{specification}', .*{says}"):
        factory_at("mine", specification)
