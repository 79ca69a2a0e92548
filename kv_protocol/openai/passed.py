"""A request to another path of an engine: the router passes it on as it is, and reads what it routes by.

| body | its model |
|---|---|
| a JSON object | `model` |
| a form (audio) | the field `model` |
| any other, or none | empty: the router takes the only model of the workers with that path |

Source: the Anthropic API reference, "Messages" (`system`, `tools`, `messages`); the OpenAI API reference, "Create
transcription".
"""

import re

import msgspec

from kv_protocol.body_limits import Bytes
from kv_protocol.openai.inbound import Inbound
from kv_protocol.openai.parts import ABSENT

_MODEL_OF_FORM = re.compile(rb'name="model"\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,256})\r\n')
_FORM_BYTES = 64 << 10
"""The field `model` is looked for in so many bytes at the beginning and at the end: a file may be between them."""


class PassedInbound(Inbound, frozen=True, kw_only=True):
    """`endpoint` is the path as workers state it; `path` is the path with the query."""

    model: str | None = None  # type: ignore[assignment]  # None as it is read; `decode_passed` returns a text
    endpoint: str = ""  # type: ignore[misc]  # other kinds have one for all their requests
    path: str = ""  # type: ignore[misc]
    system: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    messages: msgspec.Raw = ABSENT

    @property
    def changed_by(self) -> str:
        """The key of the prompt: the router does not render it."""
        return "messages"

    @property
    def prompt_parts(self) -> tuple[msgspec.Raw, ...]:
        """The JSON of what becomes the prompt, in its order."""
        return self.tools, self.system, self.messages


def passed_form(path: str, body: Bytes) -> PassedInbound:
    """Return the request to `path` whose body is a form, or none."""
    for part in (body[:_FORM_BYTES], body[-_FORM_BYTES:]):
        if found := _MODEL_OF_FORM.search(part):
            return PassedInbound(model=found[1].decode("utf-8", "replace"), endpoint=path, path=path)
    return PassedInbound(model="", endpoint=path, path=path)
