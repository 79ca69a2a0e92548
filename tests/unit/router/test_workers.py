"""Addresses of engines that a router attaches, and lists of them."""

import asyncio
from pathlib import Path

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from kv_runtime.config.loading import ConfigurationError
from router.config import RouterSettings, WorkerAddress, worker_address
from router.engine_attacher import WorkerList, agent_settings
from worker_agent.engines.servers import SERVERS


def test_an_address_has_a_name_and_options() -> None:
    options = "engine=sglang,kv-events=none,replay-endpoint=tcp://a:2,id=w0"
    for text, expected in {
        "http://10.0.0.1:8100/": WorkerAddress("http://10.0.0.1:8100", "10-0-0-1-8100"),
        "https://GPU.example": WorkerAddress("https://GPU.example", "gpu-example-443"),
        "http://[::1]:80": WorkerAddress("http://[::1]:80", "1-80"),
        f"http://a:1,{options}": WorkerAddress("http://a:1", "w0", "sglang", "none", "tcp://a:2"),
    }.items():
        assert worker_address(text) == expected


def test_a_bad_address_says_what_is_allowed_and_shows_no_secret() -> None:
    for text, found in {
        "10.0.0.1:8100": "allowed http(s)://host:port",
        "http://user:secret@a:1": "found an address with a user",
        "http://a:99999": "allowed http(s)://host:port",
        "http://a:1?x=1": "allowed http(s)://host:port",
        "http://a:1,kv-event=none": "kv-event='none', allowed engine, kv-events, replay-endpoint, id",
        "http://a:1,id=": "id='', allowed",
        "http://a:1,id=UPPER": "id: found 'UPPER'",
    }.items():
        with pytest.raises(ValidationError) as error:
            RouterSettings(workers=(text,))
        said = str(error.value.errors()[0]["msg"])
        assert found in said
        assert "secret" not in said


def test_an_option_that_the_agent_cannot_use_is_named_with_its_engine() -> None:
    for options, found in {
        "kv-events=5557": "publish_endpoint: found '5557'",
        "replay-endpoint=x,kv-events=tcp://a:2": "found 'x'",
        "engine=tgi": "kind: found 'tgi', allowed " + ", ".join(["auto", *SERVERS]),
    }.items():
        with pytest.raises(ConfigurationError, match="http://a:1: ") as error:
            agent_settings(worker_address(f"http://a:1,{options}"), RouterSettings())
        assert found in str(error.value)


def test_settings_that_do_not_fit_are_refused() -> None:
    twice, processes = (
        {"workers": ("http://a:1", "http://a:1/")},
        {"workers": ("http://a:1",), "data": {"processes": 2}},
    )
    for given in (twice, processes, {"workers_from": "dns://name"}, {"workers_from": "dns://name:0"}):
        with pytest.raises(ValidationError, match=r"workers|dns"):
            RouterSettings.model_validate(given)


async def test_a_list_in_a_file_is_read_as_it_is_now_and_kept_while_it_is_unreadable(tmp_path: Path) -> None:
    file = tmp_path / "workers"
    file.write_text("# ours\nhttp://a:1,id=a\n\nhttp://b:2\n")
    listed = WorkerList(str(file))
    assert await listed.read() == (WorkerAddress("http://a:1", "a"), WorkerAddress("http://b:2", "b-2"))
    file.write_text("a:1\n")
    with capture_logs() as lines:
        assert [await listed.read() for _ in range(3)] == [None] * 3
        file.unlink()
        assert await listed.read() is None
    assert [line["event"] for line in lines] == ["worker_list_unreadable"] * 2
    file.write_text("")
    assert await listed.read() == ()


async def test_a_list_of_a_name_has_each_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def getaddrinfo(name: str, port: int, **_: object) -> list[tuple[object, ...]]:
        assert name == "engines"
        return [(0, 0, 0, "", (host, port)) for host in ("10.0.0.2", "::1", "10.0.0.1", "10.0.0.2")]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    found = await WorkerList("dns://engines:8000").read()
    assert found is not None
    assert [each.url for each in found] == ["http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[::1]:8000"]
