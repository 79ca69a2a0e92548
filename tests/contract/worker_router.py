"""A real router on the ground's log, as a process, and what is asked of it."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from tests.contract.workers import Ground, Worker, comes, post
from tests.support.processes import running_router
from tests.system.integration.agent_http import Answered


class Router(NamedTuple):
    """A router on the ground's log."""

    ground: Ground
    data_url: str
    control_url: str

    async def ask(self, worker: Worker, path: str, asked: dict[str, Any]) -> Answered:
        """Return what a client of the router gets from the worker's model, without the comments of an event stream."""
        answered = await post(self.ground.session, self.data_url + path, worker.greedy(asked))
        return replace(answered, data=re.sub(rb"(?m)^:.*\n", b"", answered.data))

    async def until_fit(self, *awaited: Worker) -> None:
        """Return once the router counts on these workers."""
        names = {worker.worker_id for worker in awaited}

        async def are_fit() -> bool:
            return names <= {name for name, unfit in (await self._known()).items() if not unfit}

        await comes(are_fit, f"{names} fit")

    async def _known(self) -> dict[str, Any]:
        async with self.ground.session.get(f"{self.control_url}/v1/workers") as response:
            known = (await response.json())["workers"]
        return {each["registration"]["worker_id"]: each["unfit"] for each in known}


@asynccontextmanager
async def routing(ground: Ground, text: str) -> AsyncIterator[Router]:
    """Be where a router in mode kv runs."""
    place = ("--nats-url", ground.nats_url, "--text", text, "--set", "telemetry.log_level=warning")
    async with running_router(*place) as router:
        yield Router(ground, router.data_url, router.control_url)
