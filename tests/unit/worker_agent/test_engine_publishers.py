"""An engine that streams its KV events: where its publishers are, by its own arguments."""

from typing import Any

import pytest

from kv_protocol.errors import LimitExceeded
from tests.unit.worker_agent.engine_arguments import effective
from worker_agent.engine_args.arguments import EngineArgs
from worker_agent.engines.trtllm.publishers import engine_publishers
from worker_agent.events.consolidation import Origin
from worker_agent.events.engine_event_subscriber import PublisherAddress

ON = {"enable_kv_cache_events": True}


def streaming(ranks: int = 1, **config: Any) -> EngineArgs:
    parallel = {"tensor_parallel_size": ranks, "enable_attention_dp": True} if ranks > 1 else {}
    return effective({"kv_cache_config": {"kv_events_config": {**ON, **config}}, **parallel})


def addresses(args: EngineArgs, **place: Any) -> list[str]:
    return [each.endpoint for each in engine_publishers(args, **place)]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, False),
        ({}, False),
        ({"enable_kv_cache_events": False, "publisher": "zmq"}, False),
        ({**ON, "publisher": "null"}, False),
        (ON, True),
        ({**ON, "publisher": None}, True),
        ({**ON, "publisher": "zmq"}, True),
    ],
)
def test_an_engine_streams_when_it_is_told_to_publish(config: dict[str, Any] | None, expected: bool) -> None:
    args = effective({"kv_cache_config": {"kv_events_config": config}} if config is not None else {})
    assert bool(engine_publishers(args)) == expected


def test_one_rank_is_one_publisher_at_the_default_port_of_this_machine() -> None:
    assert engine_publishers(streaming()) == (PublisherAddress(Origin("engine"), "tcp://127.0.0.1:5557"),)


def test_each_attention_dp_rank_has_a_publisher_and_replays_of_its_own() -> None:
    args = streaming(2, endpoint="tcp://*:6000", replay_endpoint="tcp://0.0.0.0:7000")
    assert engine_publishers(args) == (
        PublisherAddress(Origin("engine", 0), "tcp://127.0.0.1:6000", "tcp://127.0.0.1:7000"),
        PublisherAddress(Origin("engine", 1), "tcp://127.0.0.1:6001", "tcp://127.0.0.1:7001"),
    )


def test_tensor_parallelism_alone_is_one_rank() -> None:
    args = effective({"kv_cache_config": {"kv_events_config": ON}, "tensor_parallel_size": 8})
    assert addresses(args) == ["tcp://127.0.0.1:5557"]


# -------------------------------------------------------------------- hosts
def test_ranks_that_fit_on_a_node_are_here_whatever_nodes_there_are() -> None:
    assert set(addresses(streaming(4), gpus_per_node=4, hosts=("a", "b"), nodelist="n[1-2]")) == {
        f"tcp://127.0.0.1:{5557 + rank}" for rank in range(4)
    }


def test_ranks_count_through_the_nodes_that_slurm_names() -> None:
    assert addresses(streaming(4), gpus_per_node=2, nodelist="n[08-09]") == [
        *("tcp://n08:5557", "tcp://n08:5558", "tcp://n09:5559", "tcp://n09:5560")
    ]


def test_configured_hosts_come_before_slurm_s() -> None:
    found = addresses(streaming(3), gpus_per_node=2, hosts=("10.0.0.1", "[fd00::2]"), nodelist="n[1-9]")
    assert found == ["tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558", "tcp://[fd00::2]:5559"]


@pytest.mark.parametrize("place", [{}, {"hosts": ("a",)}, {"nodelist": "a"}])
def test_too_few_hosts_are_refused(place: dict[str, Any]) -> None:
    with pytest.raises(LimitExceeded, match=r"^hosts of KV events: found '[01] hosts', allowed 2, one for each 2 of 4"):
        engine_publishers(streaming(4), gpus_per_node=2, **place)


@pytest.mark.parametrize("host", ["a b", "", "a/b", "tcp://a", "a:5", "[a]"])
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(LimitExceeded, match=r"^hosts of KV events: found "):
        engine_publishers(streaming(2), gpus_per_node=1, hosts=("a", host))


# -------------------------------------------------------------------- addresses
@pytest.mark.parametrize(
    "endpoint", ["tcp://*", "tcp://*:0", "tcp://*:65536", "inproc://events", "udp://*:5557", "5557"]
)
def test_an_address_that_cannot_be_connected_to_is_refused_by_its_name(endpoint: str) -> None:
    with pytest.raises(LimitExceeded, match=r"^kv_events_config\.endpoint: found "):
        engine_publishers(streaming(endpoint=endpoint))


@pytest.mark.parametrize(
    ("port", "is_refused"), [(5555, True), (5558, True), (5560, True), (5553, False), (5561, False)]
)
def test_ports_of_replays_are_none_of_the_publishers(port: int, is_refused: bool) -> None:
    args = streaming(4, replay_endpoint=f"tcp://*:{port}")
    if not is_refused:
        assert len(engine_publishers(args)) == 4
        return
    with pytest.raises(LimitExceeded, match=r"^kv_events_config\.replay_endpoint: found .* allowed 4 ports of its own"):
        engine_publishers(args)


@pytest.mark.parametrize("endpoint", ["ipc:///tmp/kv", "tcp://10.0.0.1:5557"])
def test_with_several_nodes_an_address_must_be_every_node_s(endpoint: str) -> None:
    with pytest.raises(LimitExceeded, match=r"allowed tcp://\*:port, where ranks are on several nodes"):
        engine_publishers(streaming(2, endpoint=endpoint), gpus_per_node=1, hosts=("a", "b"))


def test_on_one_node_the_address_that_the_engine_binds_is_connected_to() -> None:
    assert addresses(streaming(endpoint="tcp://10.0.0.1:5557")) == ["tcp://10.0.0.1:5557"]
