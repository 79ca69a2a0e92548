"""The commands, as typed: configuration shown and refused, ports in use, help."""

import socket
from pathlib import Path

import pytest

from tests.support.forked import Ended, forked


def run(*arguments: str, **environment: str) -> Ended:
    return forked("-m", *arguments, **environment)


@pytest.mark.parametrize(
    "command",
    [
        ("router",),
        ("indexer", "serve"),
        ("indexer", "verify"),
        ("worker_agent", "serve"),
        ("worker_agent", "attach", "--model", "m"),
    ],
)
def test_print_config_shows_a_tree_that_loads_again(command: tuple[str, ...], tmp_path: Path) -> None:
    first = run(*command, "--print-config")
    assert first.code == 0, first.err
    file = tmp_path / "config.yaml"
    file.write_text(first.out)
    assert run(*command, "--config", str(file), "--print-config").out == first.out


@pytest.mark.parametrize("flag", ["--port", "--control-port"])
def test_a_used_port_is_named(flag: str) -> None:
    other = "--control-port" if flag == "--port" else "--port"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused = run("router", flag, port, other, "0", "--set", "nats.port=0")
    assert refused.code == 1
    assert f"127.0.0.1:{port}" in refused.err
    assert "Traceback" not in refused.err


def test_a_used_nats_port_names_the_flag_that_helps() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused = run("router", "--port", "0", "--control-port", "0", "--set", f"nats.port={port}")
    assert refused.code == 1
    assert port in refused.err
    assert "--nats-url" in refused.err


@pytest.mark.parametrize(
    "command",
    [("router",), ("indexer", "serve")],
)
def test_an_absent_event_log_is_named(command: tuple[str, ...]) -> None:
    refused = run(*command, "--nats-url", "nats://127.0.0.1:1", "--port", "0")
    assert refused.code == 1
    assert "nats://127.0.0.1:1" in refused.err
    assert "Traceback" not in refused.err
