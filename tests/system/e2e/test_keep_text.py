"""`control.keep_text`: the text of a prompt stands with its decision, and nowhere else."""

import asyncio
from array import array
from pathlib import Path
from typing import Any

import nats
import pytest

from bench.processes import FleetShape
from kv_protocol import subjects
from tests.system.e2e.client import MODEL, Client, fleet_of
from tests.system.e2e.conftest import FAST_WORKER, QUIET_ROUTER

SECRET = "the launch code is 0000"


async def decision_after_a_chat(client: Client) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": SECRET}], "max_tokens": 2}
    answered = await client.post("/v1/chat/completions", body)
    assert answered.status == 200
    found: dict[str, Any] = await client.control(f"/v1/decisions/{answered.headers['x-decision-id']}")
    return found


def logs_of(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.iterdir()}


@pytest.mark.parametrize("processes", [1, 2])
async def test_a_prompt_stands_with_its_decision_and_not_in_journal_or_logs(processes: int, tmp_path: Path) -> None:
    settings = (*QUIET_ROUTER, "control.keep_text=true", f"data.processes={processes}", "telemetry.log_level=info")
    shape = FleetShape(workers=1, worker_settings=FAST_WORKER, router_settings=settings, log_directory=tmp_path)
    async with fleet_of(shape) as (fleet, client):
        log = await nats.connect(fleet.nats_url)
        journal = await log.subscribe(subjects.JOURNAL_ALL)
        found = await decision_after_a_chat(client)
        assert SECRET in found["prompt"]["head"]
        assert (found["prompt"]["tail"], found["prompt"]["omitted_tokens"]) == ("", 0)
        recorded, decision_id = b"", found["decision"]["decision_id"].encode()
        async with asyncio.timeout(30):
            while decision_id not in recorded:
                recorded += (await journal.next_msg(timeout=30)).data
        ids = SECRET.encode()  # of the tokenizer byte; as a list in msgpack they are the same bytes
        assert ids not in recorded
        assert array("I", [*ids]).tobytes() not in recorded
        await log.close()
    logs = logs_of(tmp_path)
    assert any("router" in name for name in logs)
    assert not any(SECRET in text for text in logs.values())
