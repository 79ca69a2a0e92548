"""What engines say of themselves, as their public servers answer, and what is taken for not said."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from kv_protocol.errors import MalformedMessage
from worker_agent.attached.client import facts_of_models, facts_of_openapi
from worker_agent.engines.servers import SERVERS
from worker_agent.engines.servers.base import EngineFacts, facts_of_version
from worker_agent.engines.servers.sglang import facts_of_server_info
from worker_agent.engines.servers.trtllm_serve import facts_of_metrics as facts_of_rows
from worker_agent.engines.servers.vllm import facts_of_event_sources, facts_of_metrics


def test_a_card_with_a_parent_is_an_adapter() -> None:
    body = json.dumps(
        {
            "object": "list",
            "data": [
                {"id": "llama", "object": "model", "parent": None, "max_model_len": 8192, "permission": [{}]},
                {"id": "chat", "parent": None, "max_model_len": 8192},
                {"id": "law", "parent": "llama", "root": "/adapters/law", "max_model_len": None},
            ],
        }
    ).encode()
    assert facts_of_models(body) == EngineFacts(served_names=("llama", "chat"), loras=("law",), max_seq_len=8192)


def test_the_paths_of_a_server_say_which_endpoints_it_serves() -> None:
    paths: dict[str, Any] = {
        "/v1/responses": {},
        "/v1/chat/completions": {"post": {}},
        "/v1/audio/speech": {},
        "/v1/models": {},
        "/v1/responses/{response_id}": {},
        "/tokenize": {},
        "/health": {},
    }
    said = facts_of_openapi(json.dumps({"openapi": "3.1.0", "paths": paths}).encode())
    assert said == EngineFacts(api_endpoints=("chat", "responses", "/tokenize", "/v1/audio/speech", "/health"))


def test_of_too_many_paths_those_that_clients_use_are_stated() -> None:
    paths = [*(f"/{number:02}" for number in range(99)), "/v1/rerank", "/tokenize"]
    stated = facts_of_openapi(json.dumps({"paths": dict.fromkeys(paths, 0)}).encode()).api_endpoints
    assert (len(stated), stated[:3]) == (60, ("/tokenize", "/v1/rerank", "/00"))


def test_sglang_says_tokens_and_means_blocks() -> None:
    body = json.dumps(
        {
            "page_size": 64,
            "max_total_num_tokens": 64_100,
            "max_running_requests": 48,
            "chunked_prefill_size": 8192,
            "max_prefill_tokens": 16_384,
            "context_length": 32_768,
            "dp_size": 2,
            "api_key": "secret",
            "version": "0.5.9",
        }
    ).encode()
    assert facts_of_server_info(body) == EngineFacts(
        block_size=64,
        total_kv_blocks=1001,
        max_num_seqs=48,
        max_num_batched_tokens=8192,
        max_seq_len=32_768,
        dp_ranks=2,
        version="0.5.9",
    )


def test_prefill_that_is_not_chunked_is_bounded_by_its_own_limit() -> None:
    body = b'{"chunked_prefill_size": -1, "max_prefill_tokens": 16384, "max_running_requests": null}'
    assert facts_of_server_info(body) == EngineFacts(max_num_batched_tokens=16_384)


def of_row(row: dict[str, Any]) -> EngineFacts:
    return facts_of_rows(json.dumps([{"maxNumBlocks": 1}, row]).encode())


def test_a_row_of_iteration_statistics_says_the_cache_unless_it_is_null() -> None:
    row = {"maxBatchSizeStatic": 64, "maxNumTokensStatic": 8192, "kvCacheStats": None}
    assert of_row(row) == EngineFacts(max_num_seqs=64, max_num_batched_tokens=8192)
    cache = {"maxNumBlocks": 900, "tokensPerBlock": 32}
    assert of_row({**row, "kvCacheStats": cache}).total_kv_blocks == 900


@pytest.mark.parametrize("count", [0, -1, 1 << 40, True, 1.5, "7", None])
def test_a_number_that_may_not_be_registered_is_taken_for_not_said(count: object) -> None:
    assert of_row({"kvCacheStats": {"maxNumBlocks": count}}) == EngineFacts()


def test_a_block_size_beyond_all_bounds_is_not_said() -> None:
    said = facts_of_metrics(b'vllm:cache_config_info{block_size="1048576",num_gpu_blocks="9"} 1.0\n')
    assert said == EngineFacts(total_kv_blocks=9, dp_ranks=1)


def test_what_was_known_before_stays_and_the_rest_is_added() -> None:
    known = EngineFacts(served_names=("chat",), block_size=16)
    said = EngineFacts(served_names=("llama",), block_size=32, max_seq_len=4096)
    assert known.with_more(said) == EngineFacts(served_names=("chat",), block_size=16, max_seq_len=4096)


@pytest.mark.parametrize("read", [facts_of_models, facts_of_openapi, facts_of_version, facts_of_server_info])
@pytest.mark.parametrize("body", [b"", b"null", b"<html>", b'{"data": 1, "version": 1, "page_size": "x"}', b"[" * 9999])
def test_anything_else_is_malformed(read: Callable[[bytes], object], body: bytes) -> None:
    with pytest.raises(MalformedMessage, match="/"):
        read(body)


def test_metrics_are_rows_of_iterations_or_another_engine_s_text() -> None:
    assert SERVERS["trtllm-serve"].iterations(b"trtllm_num_requests_running 1.0") is None
    for body in (b"[", b"[1]", b"[" * 9999):
        with pytest.raises(MalformedMessage, match="/metrics"):
            SERVERS["trtllm-serve"].iterations(body)


def test_the_root_of_a_card_is_a_directory_if_its_engine_says_so_there() -> None:
    for server in (*SERVERS.values(), None):
        card = {"id": "llama", "owned_by": "somebody" if server is None else server.owned_by, "root": "/models/llama"}
        said = facts_of_models(json.dumps({"data": [card]}).encode())
        directory = "/models/llama" if server is not None and server.states_directory else ""
        assert (said.kind, said.directory) == ("" if server is None else server.name, directory)


@pytest.mark.parametrize(
    ("config", "sockets"),
    [
        ({}, ("", "")),
        ({"kv_events_config": None}, ("none", "")),
        ({"kv_events_config": '{"publisher": "null"}'}, ("none", "")),
        ({"kv_events_config": '{"publisher": "zmq"}'}, ("tcp://*:5557", "")),
        (
            {"kv_events_config": '{"publisher":"zmq","endpoint":"tcp://*:1","replay_endpoint":"tcp://*:2","topic":""}'},
            ("tcp://*:1", "tcp://*:2"),
        ),
    ],
)
def test_sglang_says_where_its_event_sockets_are(config: dict[str, str | None], sockets: tuple[str, str]) -> None:
    said = facts_of_server_info(json.dumps({"tokenizer_path": "/models/qwen", **config}).encode())
    assert (said.publish_endpoint, said.replay_endpoint) == sockets
    assert said.directory == "/models/qwen"


def test_vllm_says_where_each_rank_publishes() -> None:
    said = {
        "1": {"publisher": "zmq", "endpoint": "tcp://10.0.0.5:41002", "replay_endpoint": "tcp://10.0.0.5:41004"},
        "0": {"publisher": "zmq", "endpoint": "tcp://10.0.0.5:41001", "replay_endpoint": "tcp://10.0.0.5:41003"},
    }
    assert facts_of_event_sources(json.dumps(said).encode()) == EngineFacts(
        publish_endpoint="tcp://10.0.0.5:41001,tcp://10.0.0.5:41002",
        replay_endpoint="tcp://10.0.0.5:41003,tcp://10.0.0.5:41004",
    )


def test_vllm_without_event_sources_has_no_events() -> None:
    assert facts_of_event_sources(b"{}") == EngineFacts(publish_endpoint="none")
    without_replay = b'{"3": {"endpoint": "tcp://*:5560", "replay_endpoint": null}}'
    assert facts_of_event_sources(without_replay) == EngineFacts(publish_endpoint="tcp://*:5560")


def test_sglang_describes_its_ranks_and_its_blocks() -> None:
    said = {
        "page_size": 16,
        "dp_size": 1,
        "attn_dp_size": 2,
        "max_total_num_tokens": 6400,
        "kv_events_config": '{"publisher": "zmq", "endpoint": "tcp://*:5557"}',
        "kv_events": {"block_size": 32, "dp_size": 2},
    }
    assert facts_of_server_info(json.dumps(said).encode()) == EngineFacts(
        block_size=32,
        total_kv_blocks=200,
        dp_ranks=2,
        publish_endpoint="tcp://*:5557",
    )
