"""`router explain` as it is typed, of a real router and of its journal."""

import asyncio
from typing import Any

import pytest

from bench.processes import FleetProcesses
from tests.support.forked import Ended
from tests.system.e2e.client import MODEL, Client
from tests.system.e2e.typed import typed

PROMPT = list(range(200))


async def explained(*arguments: str) -> Ended:
    return await typed("-m", "router", "explain", *arguments)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_router_and_its_journal_explain_a_decision_alike(fleet: FleetProcesses, client: Client) -> None:
    target = {"router": {"ttft_target": 1}}  # ms: every answer is late
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "nvext": target}
    first = await client.post("/v1/completions", body)
    await client.until_index_has(first.worker)
    again = await client.post("/v1/completions", body)
    router, journal = ("--router", fleet.control_url), ("--journal", "--nats-url", fleet.nats_url)
    decision_id, request_id = again.headers["x-decision-id"], again.headers["x-request-id"]

    async def of_journal() -> Any:
        """Return the journal's report, once the outcome is there: the journal is written behind the answer."""
        async with asyncio.timeout(60):
            while True:
                found = await explained(decision_id, *journal, "--json")
                if found.code == 0 and found.json[0]["outcome"] is not None:
                    return found.json[0]

    (live,) = (await explained(decision_id, *router, "--json")).json
    kept = await of_journal()
    for part in ("winner", "runner_up", "margin", "reason", "excluded"):
        assert kept["decision"][part] == live["decision"][part]
    terms = [[each["terms"] for each in told["decision"]["candidates"]] for told in (live, kept)]
    assert terms[0] == terms[1]
    assert live["outcome"]["cached_tokens"] == kept["outcome"]["cached_tokens"] == again.cached_tokens
    words = await explained(request_id, *router)
    assert words.out.startswith(f"Request {request_id}, 200 tokens for ")
    assert (
        f"the prediction held, {again.cached_tokens} cached tokens predicted, {again.cached_tokens} reported."
        in (words.out.splitlines()[0])
    )
    (last,) = (await explained("--last", *router, "--json")).json
    assert last["decision"]["decision_id"] == decision_id
    worst = await explained("--worst", "2", "--by", "ttft", *router, "--json")
    late = await explained("--worst", "2", "--by", "ttft", *journal, "--json")
    ids = [[each["decision"]["decision_id"] for each in told.json] for told in (worst, late)]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 2
    none = await explained("--worst", "1", *router)
    assert (await client.control(f"/v1/decisions/{decision_id}"))["prompt"] is None, "without control.keep_text"
    assert (none.code, "--worst: found no decision with a miss by cached among the newest 2" in none.err) == (2, True)


@pytest.mark.asyncio(loop_scope="module")
async def test_what_cannot_be_explained_ends_with_2_and_says_what_was_found_and_what_is_allowed(
    fleet: FleetProcesses, client: Client
) -> None:
    await client.complete(PROMPT)
    router, journal = ("--router", fleet.control_url), ("--journal", "--nats-url", fleet.nats_url)
    for arguments, words in {
        (): "found none, allowed one of an ID, --last and --worst N",
        ("d", "--last"): "found an ID and --last, allowed one of",
        ("d", "--router", "http://127.0.0.1:1", "--journal"): "found flags of both sources",
        ("d", "--journal"): "nats.url: found none, allowed the log of a running router",
        ("d", "--router", "nonsense"): "--router: found 'nonsense', allowed http(s)://host:port",
        ("none", *router): "ID: found 'none', allowed a decision among the newest of the router",
        ("none", *journal): "ID: found 'none', allowed one in the journals, which have ",
        ("d", "--router", "http://127.0.0.1:1"): "at http://127.0.0.1:1, allowed the control plane of a running router",
        ("--last", "--router", fleet.data_url): f"at {fleet.data_url}, allowed the control plane of a running router",
        ("d", "--journal", "--nats-url", "nats://127.0.0.1:1"): "127.0.0.1:1",
    }.items():
        ended = await explained(*arguments)
        assert (ended.code, ended.out) == (2, ""), arguments
        assert words in ended.err, ended.err
