"""What only engines read, paths and options: to a worker that has them, as they are, with the router's limits."""

import json
from typing import Any

import pytest

from kv_protocol.openai.endpoints import DEFAULT_ENDPOINTS
from router.request.endpoints import is_passed
from tests.unit.router.plane import CHAT, COMPLETIONS, Plane, running_plane
from tests.unit.router.samples import MODEL
from tests.unit.router.upstream import Upstream, answers, streams

EMPTY = answers(200, b'{"choices":[]}')
MESSAGES = [{"role": "user", "content": "hello"}]
OPTIONS: dict[str, Any] = {
    "mm_processor_kwargs": {"num_crops": 4},
    "vllm_xargs": {"a": 1},
    "truncate_prompt_tokens": 100,
    "request_id": "r-1",
    "media_io_kwargs": {"video": {"num_frames": 8}},
    "kv_transfer_params": {"lmcache.tag": "a"},
    "return_routed_experts": True,
    "rid": "r-1",
    "separate_reasoning": True,
    "regex": "a+",
    "lora_path": None,
    "stop_regex": None,
    "return_hidden_states": False,
    "custom_params": {"a": 1},
    "extra_key": "tenant",
    "functions": None,
    "function_call": None,
    "web_search_options": None,
    "audio": None,
    "prompt_cache_retention": None,
    "chat_template": "{{ messages }}",
    "add_special_tokens": True,
    "max_tokens": "many",
    "temperature": -7,
    "stream_options": {"include_reasoning": True},
    "response_format": {"type": "grammar", "grammar": "root ::= x"},
    "nvext": {"another": {"a": 1}},
    "tools": [{"type": "mcp", "server_label": "s"}],
}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("option", OPTIONS)
async def test_every_option_reaches_the_engine_byte_for_byte(plane: Plane, option: str, engine: str) -> None:
    fields = {"model": MODEL, "messages": MESSAGES, option: OPTIONS[option], "unknown": [1.50, None]}
    sent = json.dumps(fields, indent=1).encode()
    async with Upstream(EMPTY) as worker:
        plane.join("w0", worker.base_url, event_source=engine, accepts_token_ids=False)
        answered = await plane.post(sent, CHAT)
    assert answered.status == 200
    assert [each.body for each in worker.received] == [sent]


def unrendered(text: str) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "boss", "content": text}]}).encode()


async def test_a_prompt_that_is_not_rendered_goes_where_its_text_went_before() -> None:
    async with running_plane() as plane, Upstream(EMPTY) as worker:
        for number in range(3):
            plane.join(f"w{number}", worker.base_url)
        said = {text: [await plane.post(unrendered(text * 300), CHAT) for _ in range(3)] for text in ("a", "b", "c")}
    for answers_ in said.values():
        assert {each.headers["x-kv-unrendered"] for each in answers_} == {"messages[0].role"}
        assert len({each.headers["x-worker-instance-id"] for each in answers_}) == 1
        assert int(answers_[-1].headers["x-overlap-blocks"]) > 0
    assert plane.prompts.unrendered["messages"] == 9


async def test_the_estimated_length_of_a_prompt_that_is_not_rendered_excludes_no_worker(plane: Plane) -> None:
    async with Upstream(EMPTY) as worker:
        plane.join("w0", worker.base_url, max_seq_len=64)
        assert (await plane.post(unrendered("a" * 10_000), CHAT)).status == 200
        assert (await plane.post({"prompt": "a" * 10_000}, COMPLETIONS)).error["code"] == "context_length_exceeded"


async def test_what_was_reused_of_a_prompt_that_is_not_rendered_says_nothing_of_predictions() -> None:
    usage = b'{"usage":{"prompt_tokens":50,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0}}}'
    async with running_plane() as plane, Upstream(answers(200, usage)) as worker:
        plane.join("w0", worker.base_url)
        for _ in range(3):
            await plane.post(unrendered("a" * 1000), CHAT)
        assert plane.metric("prediction_error_tokens_count", worker="w0") == 0
        await plane.post({"prompt": "a" * 1000}, COMPLETIONS)
        assert plane.metric("prediction_error_tokens_count", worker="w0") == 1


SAID = b'{"tokens":[1,2]}'
GOOD = answers(200, SAID)
STATES = (*DEFAULT_ENDPOINTS, "/tokenize", "/v1/rerank", "/v1/audio/transcriptions", "/v1/messages")
ADMINISTRATIVE = ("/metrics", "/reset_prefix_cache", "/v1/load_lora_adapter")
FORM = (
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n\x00\xff\r\n'
    b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/rerank"])
async def test_a_body_reaches_a_worker_that_states_the_path_as_it_is(plane: Plane, path: str) -> None:
    sent = b'{ "model": "m", "unknown": [1.50] }'
    async with Upstream(GOOD) as other, Upstream(GOOD) as worker:
        plane.join("w0", other.base_url)
        plane.join("w1", worker.base_url, api_endpoints=STATES)
        answered = await plane.post(sent, path, content_type="application/json")
    assert (answered.status, answered.body, answered.headers["x-worker-instance-id"]) == (200, SAID, "w1")
    assert [(each.path, each.body) for each in worker.received] == [(path, sent)]
    assert plane.metric("requests_total", model=MODEL, mode="other", outcome="ok") == 1
    assert other.received == []


@pytest.mark.parametrize("kept", ['"max_tokens": "many"', '"model": null', '"stop": 5', '"messages": 5'])
async def test_what_only_the_engine_reads_is_not_refused(plane: Plane, kept: str) -> None:
    sent = b'{"stream": true, %b}' % kept.encode()
    async with Upstream(GOOD) as worker:
        plane.join("w0", worker.base_url, api_endpoints=STATES)
        assert (await plane.post(sent, "/v1/messages")).status == 200
    assert [each.body for each in worker.received] == [sent]


async def test_a_body_that_is_not_utf_8_is_refused(plane: Plane) -> None:
    async with Upstream(GOOD) as worker:
        plane.join("w0", worker.base_url, api_endpoints=STATES)
        refused = await plane.post(b'{"model": "m", "text": "\xff"}', "/tokenize")
    assert (refused.status, refused.error["param"]) == (400, "body")


async def test_a_form_keeps_its_type_and_names_its_model(plane: Plane) -> None:
    kind = "multipart/form-data; boundary=b"
    async with Upstream(GOOD) as worker:
        plane.join("w0", worker.base_url, api_endpoints=STATES)
        plane.join("w1", "http://127.0.0.1:1", api_endpoints=STATES, model="x", served_names=("x",))
        answered = await plane.post(FORM, "/v1/audio/transcriptions", content_type=kind)
    assert answered.status == 200
    assert [(each.headers["content-type"], each.body) for each in worker.received] == [(kind, FORM)]


async def test_a_get_keeps_its_method_and_query_and_goes_to_the_only_model(plane: Plane) -> None:
    async with Upstream(GOOD) as worker:
        plane.join("w0", worker.base_url, api_endpoints=STATES)
        assert (await plane.get("/v1/rerank?a=b")).body == SAID
        plane.join("w1", worker.base_url, api_endpoints=STATES, model="x", served_names=("x",))
        refused = await plane.get("/v1/rerank")
    assert [(each.method, each.path) for each in worker.received] == [("GET", "/v1/rerank?a=b")]
    assert (refused.status, refused.error["param"]) == (400, "model")


async def test_a_failing_worker_is_left_before_the_first_byte(plane: Plane) -> None:
    async with Upstream(answers(500)) as failing, Upstream(GOOD) as good:
        plane.join("w0", failing.base_url, api_endpoints=STATES)
        plane.join("w1", good.base_url, api_endpoints=STATES)
        answered = [await plane.post(b'{"model":"m"}', "/tokenize") for _ in range(4)]
        assert failing.received
    assert {each.status for each in answered} == {200}


async def test_messages_go_where_their_text_went_before(plane: Plane) -> None:
    def asked(text: str, turns: int) -> bytes:
        said = [{"role": "user", "content": text * 200}] + [{"role": "user", "content": "more"}] * turns
        return json.dumps({"model": MODEL, "max_tokens": 5, "system": "s", "messages": said}).encode()

    async with Upstream(streams(b"event: message_start\ndata: {}\n\n")) as worker:
        for number in range(3):
            plane.join(f"w{number}", worker.base_url, api_endpoints=STATES)
        for text in "abcd":
            answered = [await plane.post(asked(text, turns), "/v1/messages") for turns in range(3)]
            assert len({each.headers["x-worker-instance-id"] for each in answered}) == 1
            assert {each.headers["x-kv-unrendered"] for each in answered} == {"messages"}


@pytest.mark.parametrize("path", ["/v1/embeddings/other", *ADMINISTRATIVE])
async def test_what_is_closed_or_stated_by_no_worker_is_not_found(plane: Plane, path: str) -> None:
    async with Upstream(GOOD) as worker:
        plane.join("w0", worker.base_url, api_endpoints=(*STATES, *ADMINISTRATIVE))
        assert (await plane.post(b"{}", path)).status == 404
    assert worker.received == []


@pytest.mark.parametrize("path", ADMINISTRATIVE)
async def test_an_administrative_path_that_is_named_is_open(path: str) -> None:
    async with running_plane(data={"passed_paths": ["/v1/", path]}) as plane, Upstream(GOOD) as worker:
        plane.join("w0", worker.base_url, api_endpoints=(*STATES, *ADMINISTRATIVE))
        assert (await plane.post(b"{}", path)).status == 200


def test_a_path_is_open_by_its_name_or_by_a_slash_before_it() -> None:
    allowed = ("/v1/", "/tokenize")
    assert [is_passed(path, allowed) for path in ("/v1/a/b", "/tokenize", "/tokenize/a", "/v2/a")] == [
        True,
        True,
        False,
        False,
    ]
    assert [is_passed("/v1/load_lora_adapter", each) for each in (allowed, (*allowed, "/v1/load_lora_adapter"))] == [
        False,
        True,
    ]
