# mypy: ignore-errors
"""Calls of published clients at the OpenAI endpoint BASE_URL; prints a line `ok NAME` for each that was answered.

Run by the tests in an environment that has the clients (`make clients`): `python calls.py BASE_URL MODEL`.
"""

import sys
import traceback
from collections.abc import Callable
from typing import Any

import anthropic
import litellm
import openai
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

BASE_URL, MODEL = sys.argv[1], sys.argv[2]
SAID: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": WEATHER}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
CALLED: list[dict[str, Any]] = [
    *SAID,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
]
sdk = openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key="none", max_retries=0)
claude = anthropic.Anthropic(base_url=BASE_URL, api_key="none", max_retries=0)
chain = ChatOpenAI(base_url=f"{BASE_URL}/v1", api_key="none", model=MODEL, max_retries=0)
through = {"model": f"openai/{MODEL}", "api_base": f"{BASE_URL}/v1", "api_key": "none"}


@tool
def weather(city: str) -> str:
    """Return the weather of a city."""
    return city


def streamed(events: Any) -> str:
    return "".join(each.choices[0].delta.content or "" for each in events if each.choices)


CALLS: dict[str, Callable[[], object]] = {
    "openai chat": lambda: sdk.chat.completions.create(
        model=MODEL, messages=SAID, temperature=0.2, user="u", store=False, metadata={"a": "b"}, service_tier="auto"
    ).choices[0].message.content,
    "openai stream": lambda: streamed(
        sdk.chat.completions.create(model=MODEL, messages=SAID, stream=True, stream_options={"include_usage": True})
    ),
    "openai tools": lambda: sdk.chat.completions.create(
        model=MODEL, messages=CALLED, tools=TOOLS, tool_choice="auto", parallel_tool_calls=True
    ).choices[0].message.content,
    "openai structured output": lambda: sdk.chat.completions.create(
        model=MODEL,
        messages=SAID,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
    ).choices[0].message.content,
    "openai engine options": lambda: sdk.chat.completions.create(
        model=MODEL, messages=SAID, extra_body={"top_k": 5, "vllm_xargs": {"a": 1}, "mm_processor_kwargs": {}}
    ).choices[0].message.content,
    "openai completions": lambda: sdk.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=2).choices[0].text,
    "openai responses": lambda: sdk.responses.create(model=MODEL, input="hello", store=False).output_text,
    "openai responses stream": lambda: "".join(
        each.delta
        for each in sdk.responses.create(model=MODEL, input="hello", stream=True)
        if each.type == "response.output_text.delta"
    ),
    "openai embeddings": lambda: sdk.embeddings.create(model=MODEL, input=["a", "b"]).data[0].embedding,
    "openai models": lambda: sdk.models.list().data[0].id,
    "litellm chat": lambda: litellm.completion(messages=SAID, **through).choices[0].message.content,
    "litellm stream": lambda: streamed(litellm.completion(messages=SAID, stream=True, **through)),
    "litellm tools": lambda: litellm.completion(messages=CALLED, tools=TOOLS, **through).choices[0].message.content,
    "litellm embeddings": lambda: litellm.embedding(input=["a"], **through).data[0]["embedding"],
    "langchain chat": lambda: chain.invoke([("system", "Be brief."), ("human", "hello")]).content,
    "langchain stream": lambda: "".join(str(each.content) for each in chain.stream("hello")),
    "langchain tools": lambda: chain.bind_tools([weather]).invoke("rain?").content,
    "langchain structured output": lambda: chain.with_structured_output(
        {"title": "A", "description": "d", **SCHEMA}, method="json_schema", include_raw=True
    ).invoke("hello"),
    "langchain embeddings": lambda: OpenAIEmbeddings(
        base_url=f"{BASE_URL}/v1", api_key="none", model=MODEL, check_embedding_ctx_length=False
    ).embed_query("a"),
    "anthropic messages": lambda: claude.messages.create(
        model=MODEL, max_tokens=9, system="Be brief.", messages=SAID[1:]
    ).content[0].text,
    "anthropic stream": lambda: "".join(
        claude.messages.stream(model=MODEL, max_tokens=9, messages=SAID[1:]).__enter__().text_stream
    ),
    "anthropic tools": lambda: claude.messages.create(
        model=MODEL,
        max_tokens=9,
        messages=SAID[1:],
        tools=[{"name": "weather", "input_schema": WEATHER["parameters"]}],
    ).content[0].text,
}  # fmt: skip

for name, call in CALLS.items():
    try:
        answered = call()
    except Exception:  # noqa: BLE001 - whatever a client raises is a refusal
        sys.stdout.write(f"refused {name}: {traceback.format_exc(limit=-1)}\n")
    else:
        sys.stdout.write(f"ok {name}\n" if answered else f"empty {name}: {answered!r}\n")
