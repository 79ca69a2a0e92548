"""How TensorRT-LLM is asked for events and statistics."""

from typing import Any

import pytest

from worker_agent.engines.trtllm.calls import polled


@pytest.mark.parametrize(
    ("timeout_s", "pause_s", "answers", "rows", "fetches"),
    [
        (1.0, 9.0, [[{"iter": 1}]], [{"iter": 1}], 1),
        (0.0, 9.0, [[]], [], 1),
        (9.0, 0.0, [[], [], [{"iter": 1}]], [{"iter": 1}], 3),
        (0.01, 9.0, [[], []], [], 2),
    ],
)
def test_a_poll_is_repeated_until_rows_come_or_its_time_is_up(
    timeout_s: float, pause_s: float, answers: list[Any], rows: list[Any], fetches: int
) -> None:
    left = list(answers)
    assert polled(lambda: left.pop(0), timeout_s, pause_s) == rows
    assert len(answers) - len(left) == fetches
