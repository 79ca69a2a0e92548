"""What a worker's status says of it: a worker that refuses the router's token opens its breaker."""

import pytest

from tests.unit.router.plane import Plane, running_plane
from tests.unit.router.upstream import Upstream, answers

_REFUSAL = b'{"error":{"message":"no","type":"t","param":null,"code":null}}'
_GOOD = answers(200, b"{}")


@pytest.mark.parametrize("status", [401, 407])
async def test_a_worker_that_refuses_the_routers_token_is_left_alone_and_another_answers(status: int) -> None:
    async with running_plane() as plane, Upstream(answers(status, _REFUSAL)) as deaf, Upstream(_GOOD) as good:
        plane.join("w0", deaf.base_url, holds=3)
        plane.join("w1", good.base_url)
        answered = [await _status(plane) for _ in range(4)]
        assert (answered, len(deaf.received)) == ([200] * 4, 3)
        assert plane.unfit("w0") == f"breaker open: first_byte: status {status}: the worker refuses data.worker_token"


@pytest.mark.parametrize(("status", "is_open"), [(500, False), (502, True), (504, True)])
async def test_an_error_that_every_request_gets_opens_a_breaker_only_if_it_cannot_be_the_requests_fault(
    status: int, is_open: bool
) -> None:
    async with running_plane() as plane, Upstream(answers(status, _REFUSAL)) as worker:
        plane.join("w0", worker.base_url)
        for _ in range(3):
            await _status(plane)
        assert plane.unfit("w0") == (f"breaker open: first_byte: status {status}" if is_open else "")


async def _status(plane: Plane) -> int:
    return (await plane.post()).status
