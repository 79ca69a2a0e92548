"""What requests for a model have in common holds as long as the fleet and the policy do."""

import gc
from typing import Any

import pytest

from router.decision.policy import Policy
from router.http.exchange import BufferedResponse, Exchange
from router.prompt.chains import RecentPrompts
from tests.unit.router.plane import COMPLETIONS, Plane, encoded, running_plane, until
from tests.unit.router.upstream import Upstream, answers, completion

GOOD = answers(200, completion())
LONG = {"prompt": "long " * 20_000}
"""A prompt whose body a thread reads."""


def begun(plane: Plane, body: dict[str, Any]) -> None:
    """Let a request come, up to what it waits for."""
    client = BufferedResponse(plane.server.upstreams)
    plane.serving.serve(Exchange(client, "POST", COMPLETIONS, "", {}, encoded(body), 0.0))


async def test_a_request_waits_as_a_policy_says_that_came_while_it_was_read(plane: Plane) -> None:
    async with Upstream(GOOD) as worker:
        plane.join("w0", worker.base_url)
        assert (await plane.post()).status == 200
        begun(plane, LONG)
        plane.routing.set_policy(Policy(mode="predicted-ttft", itl_target_s=1e-9, unmet="queue"))
        await until(lambda: len(plane.admission.queue) == 1)
        assert len(worker.received) == 1
        plane.routing.set_policy(Policy())
        await until(lambda: len(worker.received) == 2)


async def test_nothing_is_kept_of_models_that_left() -> None:
    def kept() -> int:
        gc.collect()
        return len(gc.get_objects())

    async def served(number: int) -> None:
        plane.join("w0", worker.base_url, loras=(f"adapter-{number}",))
        begun(plane, {"model": f"adapter-{number}"})
        await until(lambda: plane.serving.metrics.inflight == 0)
        plane.leave("w0")
        worker.received.clear()

    async with running_plane(decisions_max=1) as plane, Upstream(GOOD) as worker:
        for number in range(10):
            await served(number)
        before = kept()
        for number in range(10, 60):
            await served(number)
        assert kept() - before < 50


async def test_a_prompt_is_kept_for_a_hand_over_with_its_salt(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    recent = RecentPrompts()
    monkeypatch.setattr(plane.serving, "_recent", recent)
    async with Upstream(answers(200, completion())) as worker:
        plane.join("w0", worker.base_url)
        for asked in ({}, {"cache_salt": "s"}, {"nvext": {"cache_salt": "t"}}):
            assert (await plane.post(asked)).status == 200
    assert [each.salt for each in recent.newest_first()] == ["t", "s", ""]
