"""How often TensorRT-LLM is asked for events and statistics."""

from typing import Any

import pytest

from worker_agent.engines.trtllm.polling import EVENT_PAUSES, STATISTICS_PAUSES, RowPoller

ROW = {"iter": 1}


class Time:
    """Time that passes only in `sleep`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept_ms: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept_ms.append(round(seconds * 1000, 3))


class Fetches:
    """Answers of an engine, one a fetch; after them it has nothing."""

    def __init__(self, *answers: list[dict[str, Any]]) -> None:
        self.answers = list(answers)
        self.count = 0

    def __call__(self) -> list[dict[str, Any]]:
        self.count += 1
        return self.answers.pop(0) if self.answers else []


def polling(time: Time, pauses: Any = EVENT_PAUSES) -> RowPoller:
    return RowPoller(pauses, now_s=lambda: time.now_s, sleep=time.sleep)


def test_what_is_there_comes_at_once() -> None:
    time, fetches = Time(), Fetches([ROW])
    assert polling(time).rows(fetches, 1.0) == [ROW]
    assert (fetches.count, time.slept_ms) == (1, [])


def test_without_a_timeout_there_is_one_fetch_and_no_pause() -> None:
    time, fetches = Time(), Fetches()
    assert polling(time).rows(fetches, 0.0) == []
    assert (fetches.count, time.slept_ms) == (1, [])


@pytest.mark.parametrize(
    ("pauses", "told"), [(EVENT_PAUSES, [5, 7.5, 11.25, 16.875, 20, 20, 19.375]), (STATISTICS_PAUSES, [10, 20, 40, 30])]
)
def test_pauses_grow_while_nothing_comes_and_end_with_the_time(pauses: Any, told: list[float]) -> None:
    time, fetches = Time(), Fetches()
    assert polling(time, pauses).rows(fetches, 0.1) == []
    assert time.slept_ms == told
    assert fetches.count == len(told) + 1


def test_an_idle_engine_is_asked_less_than_a_hundred_times_a_second() -> None:
    time, fetches = Time(), Fetches()
    events = polling(time)
    while time.now_s < 10.0:
        assert events.rows(fetches, 0.05) == []
    assert fetches.count < 1000


def test_what_came_makes_the_next_pause_the_shortest_again() -> None:
    time, fetches = Time(), Fetches([], [], [], [ROW], [])
    events = polling(time)
    assert events.rows(fetches, 1.0) == [ROW]
    events.rows(fetches, 0.005)
    assert time.slept_ms == [5, 7.5, 11.25, 5]


def test_an_error_of_the_engine_is_raised() -> None:
    def broken() -> list[dict[str, Any]]:
        raise OSError("cut off")

    with pytest.raises(OSError, match="cut off"):
        polling(Time()).rows(broken, 1.0)
