"""The tree of `attach`: what it means, and what it refuses by name."""

from typing import Any
from unittest.mock import create_autospec

import pytest
import zmq.asyncio

from kv_runtime.config.loading import ConfigurationError, load_settings
from kv_runtime.event_log import EventLog
from kv_runtime.text.byte_model import ByteText
from tests.support.manual_clock import ManualClock
from worker_agent.attached.config import AttachedEngineSection, AttachSettings, completed_facts, engine_registration
from worker_agent.engines.servers.base import EngineFacts
from worker_agent.events.consolidator import event_path
from worker_agent.events.engine_event_subscriber import PublisherAddress

HOST = {"source": "host", "endpoint": "tcp://127.0.0.1:5557"}


def attach_settings(**flags: Any) -> AttachSettings:
    return load_settings(AttachSettings, flags={"worker.id": "w", "engine.model": "m", **flags})


def attach(**engine: Any) -> tuple[PublisherAddress, ...]:
    settings = attach_settings(**{f"engine.{name}": value for name, value in engine.items()})
    return settings.settled(EngineFacts()).streams("i", "m", 0).publishers


def engine_section(**engine: Any) -> AttachedEngineSection:
    return AttachedEngineSection(model="m", **engine)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ({"endpoint": "tcp://1.2.3.4:1"}, "endpoint: found 'tcp://1.2.3.4:1'"),
        ({"replay_endpoint": "x"}, "replay_endpoint: found 'x'"),
        ({"source": "engine"}, "found source 'engine', allowed another name"),
        ({"source": "A B"}, "events.sources.1.source: found 'A B'"),
        ({}, "found source 'host' of dp_ranks [None, None], allowed each rank once"),
        ({"dp_rank": 0}, "found source 'host' of dp_ranks [None, 0]"),
    ],
)
def test_what_another_source_may_not_be_is_named(source: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        attach_settings(**{"events.sources": [HOST, {**HOST, **source}]})
    assert problem in str(refused.value)


async def test_a_source_of_a_rank_that_the_worker_has_not_is_named_before_a_socket_is_opened() -> None:
    settings = attach_settings(
        **{"engine.dp_ranks": 2, "events.sources": [HOST | {"dp_rank": each} for each in (1, 3)]}
    )
    worker, log = settings.streams("i", "m", 16), create_autospec(EventLog, instance=True)
    with pytest.raises(ConfigurationError, match=r"events\.sources: found dp_rank 3 of host, allowed .*: \[0, 1\]"):
        event_path(
            worker, None, settings.events.sources, log, zmq.asyncio.Context.instance(), ManualClock(), ring_bytes_max=1
        )


def test_an_attached_worker_has_the_labels_of_its_agent() -> None:
    labels = {"worker.taints": ["spot"], "worker.transfer_domain": "rack-1"}
    settings = attach_settings(**labels)
    facts = EngineFacts(served_names=("m",), block_size=16)
    registered = engine_registration(settings.settled(facts), facts, ByteText(), "i", "http://h:1")
    assert (registered.taints, registered.transfer_domain) == (("spot",), "rack-1")


@pytest.mark.parametrize("taint", ["", "a,b", " a", "a ", "t" * 257])
def test_a_taint_that_no_request_can_name_is_refused(taint: str) -> None:
    with pytest.raises(ConfigurationError, match=r"worker\.taints\.0: found "):
        attach_settings(**{"worker.taints": [taint]})


def test_one_rank_has_one_publisher_whose_batches_say_the_rank() -> None:
    (publisher,) = attach(publish_endpoint="tcp://*:5557", replay_endpoint="tcp://127.0.0.1:5558")
    assert (publisher.endpoint, publisher.replay_endpoint) == ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")
    assert publisher.origin == ("engine", None)


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        ({"replay_endpoint": "tcp://127.0.0.1:5559", "dp_ranks": 3}, "replay_endpoint: found 'tcp://127.0.0.1:5559'"),
        ({"publish_endpoint": "tcp://*:65535", "dp_ranks": 2}, "port 65536 of rank 1"),
        ({"publish_endpoint": "tcp://h:1"}, "publish_endpoint: found 'tcp://h:1'"),
        ({"kind": "trtllm-serve"}, "base_url: found '', allowed http://host:port where /kv_cache_events is polled"),
        ({"publish_endpoint": "poll", "base_url": "http://h"}, "publish_endpoint: found 'poll'"),
        ({"kind": "trtllm-serve", "base_url": "http://h", "replay_endpoint": "tcp://*:1"}, "allowed none where events"),
        ({"metrics_path": "metrics"}, "engine.metrics_path: found 'metrics'"),
        ({"served_names": ["chat", ""]}, "engine.served_names.1: found ''"),
        ({"base_url": "http://h:1/v1/"}, "base_url: found 'http://h:1/v1/', allowed without /v1"),
    ],
)
def test_what_an_engine_may_not_be_is_named(engine: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        attach(**engine)
    assert problem in str(refused.value)


def test_events_of_trtllm_serve_are_polled_unless_it_publishes_them() -> None:
    assert engine_section(kind="trtllm-serve", base_url="http://h").is_polled
    assert attach(kind="trtllm-serve", base_url="http://h") == ()
    (publisher,) = attach(kind="trtllm-serve", base_url="http://h", publish_endpoint="tcp://*:6000")
    assert publisher.endpoint == "tcp://127.0.0.1:6000"
    assert [each.endpoint for each in attach(kind="sglang")] == ["tcp://127.0.0.1:5557"]


@pytest.mark.parametrize(
    ("engine", "is_forwarded"),
    [
        ({}, False),
        ({"dp_ranks": 2}, True),
        ({"dp_ranks": 2, "kind": "sglang"}, True),
        ({"dp_ranks": 2, "kind": "trtllm-serve", "base_url": "http://h"}, False),
        ({"dp_ranks": 2, "requests": "direct"}, False),
        ({"requests": "forward"}, True),
    ],
)
def test_requests_are_forwarded_where_ranks_are_chosen(engine: dict[str, Any], is_forwarded: bool) -> None:
    assert engine_section(**engine).is_forwarded is is_forwarded


def test_what_is_configured_counts_before_what_the_engine_says() -> None:
    said = EngineFacts(served_names=("llama",), loras=("law",), block_size=32, total_kv_blocks=9, max_seq_len=100)
    assert completed_facts(AttachedEngineSection(), said) == said
    facts = completed_facts(engine_section(total_kv_blocks=7, max_num_seqs=4, block_size=32), said)
    assert (facts.served_names, facts.loras, facts.total_kv_blocks) == (("m",), ("law",), 7)
    assert (facts.max_num_seqs, facts.max_seq_len) == (4, 100)
    embeds = completed_facts(engine_section(api_endpoints=("embeddings",)), EngineFacts(api_endpoints=("chat",)))
    assert embeds.api_endpoints == ("embeddings",)


@pytest.mark.parametrize(("kind", "block_size"), [("vllm", 16), ("sglang", 1), ("trtllm-serve", 32)])
def test_an_engine_that_says_nothing_has_its_kinds_blocks(kind: str, block_size: int) -> None:
    engine = engine_section(kind=kind, base_url="http://h")
    assert completed_facts(engine, EngineFacts()).block_size == block_size


def test_a_block_size_that_is_not_the_engines_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"engine\.block_size: found 16, allowed 32, which is the engine's"):
        completed_facts(engine_section(block_size=16), EngineFacts(block_size=32))


@pytest.mark.parametrize(
    ("given", "said", "settled"),
    [
        ({}, {"kind": "vllm"}, ("vllm", 1, "tcp://10.0.0.5:5557", "")),
        ({}, {"kind": "trtllm-serve"}, ("trtllm-serve", 1, "poll", "")),
        (
            {},
            {"kind": "sglang", "dp_ranks": 2, "publish_endpoint": "tcp://*:1", "replay_endpoint": "tcp://*:9"},
            ("sglang", 2, "tcp://10.0.0.5:1", "tcp://10.0.0.5:9"),
        ),
        (
            {},
            {"kind": "vllm", "dp_ranks": 2, "publish_endpoint": "tcp://10.0.0.5:41001,tcp://0.0.0.0:41002"},
            ("vllm", 2, "tcp://10.0.0.5:41001,tcp://10.0.0.5:41002", ""),
        ),
        ({}, {"kind": "sglang", "publish_endpoint": "none"}, ("sglang", 1, "none", "")),
        (
            {"kind": "vllm", "dp_ranks": 3, "publish_endpoint": "tcp://127.0.0.1:7"},
            {"kind": "sglang", "dp_ranks": 2, "publish_endpoint": "tcp://*:1"},
            ("vllm", 3, "tcp://127.0.0.1:7", ""),
        ),
    ],
    ids=[
        "vllm by default",
        "trtllm-serve is polled",
        "as sglang says",
        "a port a rank",
        "no events",
        "what is set counts",
    ],
)
def test_what_is_not_set_is_as_the_engine_says(
    given: dict[str, Any], said: dict[str, Any], settled: tuple[str, int, str, str]
) -> None:
    found = AttachedEngineSection(base_url="http://10.0.0.5:8100", **given).settled(EngineFacts(**said))
    assert (found.kind, found.dp_ranks, found.publish_endpoint, found.replay_endpoint) == settled
    assert len(found.publishers()) == (found.dp_ranks if found.publish_endpoint.startswith("tcp") else 0)
