"""Addresses of foreign publishers, and one port for each rank."""

import pytest

from worker_agent.events.publishers import checked_endpoint, rank_endpoint, rank_endpoints


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557"),
        ("tcp://localhost:1", "tcp://localhost:1"),
        ("tcp://[::1]:65535", "tcp://[::1]:65535"),
        ("tcp://*:5557", "tcp://127.0.0.1:5557"),
        ("ipc:///tmp/kv.sock", "ipc:///tmp/kv.sock"),
    ],
)
def test_this_machine_s_addresses_are_taken(value: str, expected: str) -> None:
    assert checked_endpoint("endpoint", value, allow_remote=False) == expected


@pytest.mark.parametrize(
    "value",
    [
        "", "127.0.0.1:5557", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://127.0.0.1:65536", "tcp://127.0.0.1:*",
        "inproc://x", "udp://127.0.0.1:5557", "ipc://", "tcp://a b:1", "tcp://h:1;tcp://h:2", "ipc:///" + "x" * 107,
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused_with_what_was_found(value: str) -> None:
    with pytest.raises(ValueError, match="replay_endpoint: found ") as refused:
        checked_endpoint("replay_endpoint", value, allow_remote=True)
    assert repr(value) in str(refused.value)


@pytest.mark.parametrize("value", ["tcp://10.0.0.7:5557", "tcp://engine-7:5557", "tcp://0.0.0.0:5557"])
def test_other_machines_are_refused_unless_allowed(value: str) -> None:
    with pytest.raises(ValueError, match="unless allow_remote is true"):
        checked_endpoint("endpoint", value, allow_remote=False)
    assert checked_endpoint("endpoint", value, allow_remote=True) == value


def test_a_rank_has_a_port_or_a_path_of_its_own() -> None:
    assert [rank_endpoint("tcp://127.0.0.1:5557", rank) for rank in (0, 1, 7)] == [
        "tcp://127.0.0.1:5557",
        "tcp://127.0.0.1:5558",
        "tcp://127.0.0.1:5564",
    ]
    assert [rank_endpoint("ipc:///tmp/kv", rank) for rank in (0, 2)] == ["ipc:///tmp/kv", "ipc:///tmp/kv_dp2"]


def test_each_rank_may_have_its_own_address() -> None:
    stated = "tcp://127.0.0.1:41001,tcp://127.0.0.1:40007"
    assert rank_endpoints("endpoint", stated, 2, allow_remote=False) == stated.split(",")
    with pytest.raises(ValueError, match="endpoint: found 2 addresses, allowed one, or one of each of 3 ranks"):
        rank_endpoints("endpoint", stated, 3, allow_remote=False)


def test_ranks_beyond_the_last_port_are_refused() -> None:
    assert rank_endpoint("tcp://127.0.0.1:65530", 5) == "tcp://127.0.0.1:65535"
    with pytest.raises(ValueError, match="port 65536 of rank 6, allowed up to 65535"):
        rank_endpoint("tcp://127.0.0.1:65530", 6)
