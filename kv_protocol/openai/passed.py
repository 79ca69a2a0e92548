"""A request to another path of engines: passed on as it is. The router reads its model, and the text of messages.

| body | the model is in |
|---|---|
| JSON | `model` |
| a form (audio) | its field `model` |
| none, or one without it | nothing: the workers that have the path must serve one model |

Source: the Anthropic API reference, "Messages" (`system`, `tools`, `messages`); the OpenAI API reference, "Create
transcription".
"""

import re

import msgspec

from kv_protocol.body_limits import Bytes
from kv_protocol.errors import UNDECODABLE
from kv_protocol.openai.errors import explained
from kv_protocol.openai.inbound import Inbound
from kv_protocol.openai.parts import ABSENT

_MODEL_OF_FORM = re.compile(rb'name="model"\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,256})\r\n')
_FORM_BYTES = 64 << 10
"""Of the beginning and of the end of a form, between which a file may be."""


class PassedInbound(Inbound, frozen=True, kw_only=True):
    """`endpoint` is the path that a worker states, `path` has the query, too."""

    model: str = ""
    endpoint: str = ""  # type: ignore[misc]  # of each request; other kinds have one
    path: str = ""  # type: ignore[misc]
    system: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    messages: msgspec.Raw = ABSENT

    @property
    def changed_by(self) -> str:
        """The key of the prompt: only the engine knows what it becomes."""
        return "messages"

    @property
    def prompt_parts(self) -> tuple[msgspec.Raw, ...]:
        """The JSON of what becomes the prompt, in its order."""
        return self.tools, self.system, self.messages


class _Read(msgspec.Struct, frozen=True):
    model: str | None = None
    system: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    messages: msgspec.Raw = ABSENT


_decoder = msgspec.json.Decoder(_Read)


def decode_passed(path: str, body: Bytes) -> PassedInbound:
    """Return the request to `path` whose body is JSON; raise `RequestInvalid` if it is none."""
    try:
        read = _decoder.decode(body)
    except UNDECODABLE as error:
        raise explained(error, body, _Read) from error
    return PassedInbound(
        model=read.model or "",
        endpoint=path,
        path=path,
        system=read.system,
        tools=read.tools,
        messages=read.messages,
    )


def passed_form(path: str, body: Bytes) -> PassedInbound:
    """Return the request to `path` whose body is a form, or none."""
    for part in (body[:_FORM_BYTES], body[-_FORM_BYTES:]):
        if found := _MODEL_OF_FORM.search(part):
            return PassedInbound(model=found[1].decode("utf-8", "replace"), endpoint=path, path=path)
    return PassedInbound(endpoint=path, path=path)
