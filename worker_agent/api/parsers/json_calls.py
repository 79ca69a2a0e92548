"""Calls that are JSON objects: {"name": ..., "arguments": {...}}, read incrementally and not decoded.

    keys             "name", and "arguments" or "parameters", in any order; others are skipped
    the arguments    are sent as the model wrote them, from the first character on, once the name is known
    no arguments     {}, also for null: clients expect an object

If brackets or quotes do not match, the arguments continue until they do, or until the family's end marker.
"""

import json
import re

from worker_agent.api.parsers.calls import AnswerParser, CallForm
from worker_agent.api.parsers.reader import NAME_CHARACTERS_MAX, Rejected, Show, Steps

_IN_STRING = re.compile(r'[^"\\]+')
_BETWEEN = re.compile(r'[^"{}\[\]<]+')
_SCALAR = re.compile(r"[^\s,}\]<]+")
_ARGUMENTS = ("arguments", "parameters")


class JsonCalls(AnswerParser):
    """Reads calls that are objects. `end_marker` ends arguments even if brackets do not match."""

    end_marker = "</tool_call>"

    def _object(self, *, needs_arguments: bool = False) -> Steps[None]:
        """Read one call; raise `Rejected` if the object has no function name, or lacks arguments that it needs."""
        reader, has_arguments, name, held = self._reader, False, "", list[str]()
        yield from reader.expect("{")
        while (yield from reader.skip_space()) not in ("}", ""):
            if (yield from reader.literal(",")):
                continue
            key = _decoded((yield from self._string()))
            yield from reader.skip_space()
            yield from reader.expect(":")
            first = yield from reader.skip_space()
            if key == "name" and first == '"' and not name:
                name = _decoded((yield from self._string()))
                if held:
                    self._start_with(name, "".join(held))
            elif key in _ARGUMENTS and not has_arguments:
                has_arguments = True
                if name:
                    self._start_with(name, "")
                show = self._arguments if name else held.append
                if first == "n":
                    null: list[str] = []
                    yield from self._value(null.append)
                    show("{}" if (written := "".join(null)) == "null" else written)
                else:
                    yield from self._value(show)
            else:
                yield from self._value(lambda _: None)
        yield from reader.expect("}")
        if not name or (needs_arguments and not has_arguments):
            raise Rejected
        if not has_arguments:
            self._start_with(name, "{}")
        self._is_open = False

    def _start_with(self, name: str, arguments: str) -> None:
        self._start(name)
        self._arguments(arguments)

    def _value(self, show: Show) -> Steps[None]:
        """Show a value's text, whatever it is, as it comes."""
        reader, depth = self._reader, 0
        while following := (yield from reader.peek()):
            if following == '"':
                yield from self._string_to(show)
            elif following in "{[":
                show(reader.take())
                depth += 1
                continue
            elif following in "}]" and depth:
                show(reader.take())
                depth -= 1
            elif following == "<":
                if (yield from reader.literal(self.end_marker)):
                    raise Rejected
                show(reader.take())
                continue
            elif depth:
                show(reader.span(_BETWEEN))
                continue
            else:
                yield from self._scalar(show)
            if not depth:
                return

    def _scalar(self, show: Show) -> Steps[None]:
        while (following := (yield from self._reader.peek())) and _SCALAR.match(following):
            show(self._reader.span(_SCALAR))
        if following == "":
            raise Rejected

    def _string(self) -> Steps[str]:
        parts: list[str] = []
        yield from self._string_to(parts.append)
        return "".join(parts)

    def _string_to(self, show: Show) -> Steps[None]:
        reader = self._reader
        yield from reader.expect('"')
        show('"')
        while following := (yield from reader.peek()):
            if following == "\\":
                show(reader.take())
                if (yield from reader.peek()):
                    show(reader.take())
            elif following == '"':
                show(reader.take())
                return
            else:
                show(reader.span(_IN_STRING))
        raise Rejected


class HermesParser(JsonCalls):
    """Hermes 2 Pro and 3, Qwen 2.5 and 3: <tool_call> object </tool_call>, any number.

    Source: vllm-project/vllm, `vllm/entrypoints/openai/tool_parsers/hermes_tool_parser.py`; sgl-project/sglang,
    `python/sglang/srt/function_call/qwen25_detector.py`; NVIDIA/TensorRT-LLM,
    `tensorrt_llm/serve/tool_parser/qwen3_tool_parser.py`.
    """

    special_tokens = ("<tool_call>", "</tool_call>")
    call = "<tool_call>"
    openings = ("<tool_call>\n{", "<tool_call>{", "<tool_call> {")
    form = CallForm('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n")

    def _one(self) -> Steps[None]:
        yield from self._reader.skip_space()
        yield from self._object()
        yield from self._reader.skip_space()
        yield from self._reader.literal(self.end_marker)


class Llama3JsonParser(JsonCalls):
    """Llama 3.1 to 3.3: an object at the answer's beginning, or after <|python_tag|>; others after `;`.

    An object without arguments is content: it may be an answer in JSON.
    Source: vllm-project/vllm, `vllm/entrypoints/openai/tool_parsers/llama_tool_parser.py`; sgl-project/sglang,
    `python/sglang/srt/function_call/llama32_detector.py`.
    """

    call = "<|python_tag|>"
    special_tokens = (call,)
    stop_tokens = ("<|eom_id|>",)
    form = CallForm('{"name": "', '", "parameters": ', "}", separator="; ")

    def _begin(self) -> Steps[None]:
        while (first := (yield from self._reader.peek())).isspace():
            self._content(self._reader.take())
        if first == "{":
            yield from self._tried("")

    def _one(self) -> Steps[None]:
        yield from self._reader.skip_space()
        yield from self._object(needs_arguments=True)
        while (yield from self._reader.skip_space()) == ";":
            self._reader.record(self._reader.take())
            yield from self._reader.skip_space()
            yield from self._object(needs_arguments=True)


class MistralParser(JsonCalls):
    """Mistral: [TOOL_CALLS] and a list of objects, or, for each call, [TOOL_CALLS] name [CALL_ID] id [ARGS] arguments.

    In the second form [CALL_ID] with its id, and [ARGS], may be absent. The templates require ids of nine letters and
    digits.
    Source: vllm-project/vllm, `vllm/entrypoints/openai/tool_parsers/mistral_tool_parser.py`; sgl-project/sglang,
    `python/sglang/srt/function_call/mistral_detector.py`; mistralai/mistral-common (tokenizer v11, v13).
    """

    special_tokens = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    call = "[TOOL_CALLS]"

    @staticmethod
    def _id_of(digest: str) -> str:
        return digest[:9]

    def _one(self) -> Steps[None]:
        if (yield from self._reader.skip_space()) != "[":
            yield from self._named()
            return
        yield from self._reader.expect("[")
        while (yield from self._reader.skip_space()) == "{":
            yield from self._object()
            yield from self._reader.skip_space()
            self._reader.record("")
            yield from self._reader.literal(",")
        self._reader.recorded()
        yield from self._reader.literal("]")

    def _named(self) -> Steps[None]:
        name = ""
        while (following := (yield from self._reader.peek())) and following not in "[{":
            name += self._reader.take()
            if len(name) > NAME_CHARACTERS_MAX:
                raise Rejected
        if (yield from self._reader.literal("[CALL_ID]")):
            yield from self._reader.before(("[ARGS]",))
        else:
            yield from self._reader.literal("[ARGS]")
        if (yield from self._reader.skip_space()) != "{":
            raise Rejected
        self._start(name.strip())
        yield from self._value(self._arguments)
        self._is_open = False


def _decoded(string: str) -> str:
    try:
        return str(json.loads(string, strict=False))
    except ValueError as error:
        raise Rejected from error
