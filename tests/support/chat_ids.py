"""The tokens of chats as numbers."""

from array import array
from collections.abc import Sequence

from typing_extensions import Unpack

from kv_runtime.text.chat_messages import Message
from kv_runtime.text.chat_template import ChatOptions
from kv_runtime.text.model import Text


def chat_ids(text: Text, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> list[int]:
    """Return the result of `pack_chat` as numbers."""
    return array("I", text.pack_chat(messages, **options)).tolist()
