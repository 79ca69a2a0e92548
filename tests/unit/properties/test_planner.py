"""Every request is answered once and truthfully, whatever its workers do; planted bugs are found."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings

from router.request.request import Request
from tests.support.amount import examples
from tests.support.planting import inside, plant
from tests.unit.properties.planned_requests import Wish, World, live, worlds


@given(world=worlds())
@settings(max_examples=examples(80))
def test_every_request_ends_in_one_answer_or_one_error(world: World) -> None:
    asyncio.run(live(world))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(world=worlds())
@settings(max_examples=examples(300))
def test_every_request_ends_in_one_answer_or_one_error_in_many_worlds(world: World) -> None:
    asyncio.run(live(world))


def _begins_anew_behind_a_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    send = inside(Request, "_send")

    def forgetful(request: Request[Any]) -> None:
        request.progress = None
        send(request)

    plant(Request, "_send", forgetful, monkeypatch)


@pytest.mark.planted
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a world that fails leaves sockets open
def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(
        roles=("aggregated", "aggregated"),
        faults=(("cut after three",), ("cut after three",)),
        wishes=(Wish(tokens=6, is_streamed=True, leaves_after=None),),
        retry_limit=2,
        migration_limit=2,
        unreachable=frozenset(),
    )
    asyncio.run(live(world))
    _begins_anew_behind_a_cut(monkeypatch)
    with pytest.raises(AssertionError):
        asyncio.run(live(world))
