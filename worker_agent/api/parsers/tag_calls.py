r"""Calls with a tag for each parameter; they become JSON by the types of the request's tools (`values.py`).

    Qwen3-Coder, Qwen3.5    <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n ...
                            </function>\n</tool_call>
    GLM 4.5, 4.6            <tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n ... </tool_call>
    GLM 4.7                 the same without line ends
    MiniMax M2              <minimax:tool_call>\n<invoke name="NAME">\n<parameter name="KEY">VALUE</parameter>\n ...
                            </invoke>\n ... </minimax:tool_call>
    DeepSeek V3.2           the same with <|DSML|function_calls>, <|DSML|invoke ...>, <|DSML|parameter ...> (U+FF5C for
                            the bars), where string="true" or "false" says whether VALUE is text or JSON

After its name a call may also have all arguments in one JSON object, which is passed on as written. For Qwen one line
end before a value and one after it are not part of it, and its outer tags and the ends of parameters may be absent, as
that model omits them. Other values are exactly what is between their tags.

Source: the chat templates of Qwen/Qwen3-Coder-480B-A35B-Instruct, zai-org/GLM-4.5, GLM-4.6 and GLM-4.7-Flash,
MiniMaxAI/MiniMax-M2 (and its `docs/tool_calling_guide.md`), deepseek-ai/DeepSeek-V3.2 (`encoding/encoding_dsv32.py`);
NVIDIA/TensorRT-LLM, `tensorrt_llm/serve/tool_parser/`: `qwen3_coder_parser.py`, `glm4_parser.py`, `glm47_parser.py`,
`minimax_m2_parser.py`, `deepseekv32_parser.py`; vllm-project/vllm, `vllm/tool_parsers/`: `qwen3coder_tool_parser.py`,
`deepseekv32_tool_parser.py`; sgl-project/sglang, `python/sglang/srt/function_call/`: `qwen3_coder_detector.py`,
`glm4_moe_detector.py`, `minimax_m2.py`, `deepseekv32_detector.py`.
"""

import re

from worker_agent.api.parsers.calls import AnswerOptions, AnswerParser, CallForm
from worker_agent.api.parsers.reader import Rejected, Steps
from worker_agent.api.parsers.values import ANY, EXACT, Value, quoted, types_of

_NAME = re.compile(r"""[^\s<>{}"']+""")
_HEADER = re.compile(r"""\s*["']?(.*?)["']?(?:\s+string=["']?(true|false)["']?)?\s*""", re.DOTALL)

_STATED = {"true": EXACT, "false": ANY}
_DSML = "\uff5cDSML\uff5c"


class TagParser(AnswerParser):
    """Reads the calls of a family by its tags.

    A header is a name, perhaps in quotes. A call's header is between `call` and one of `name_ends`, a parameter's
    between `key` and `key_end`. `value` is the tag before a value, if the family has one; `value_ends` end the value.
    One `padding` after the header, and one before the end, are not part of the value.
    """

    call_end: str
    key: str
    value_ends: tuple[str, ...]
    name_ends: tuple[str, ...] = (">",)
    key_end = ">"
    value = padding = ""

    def __init__(self, answer: str, options: AnswerOptions) -> None:
        if self.section:
            self.openings = (f"{self.section}\n{self.call}",)
        else:  # the tag by itself may occur in a thought
            self.openings = tuple(self.call + tool["function"]["name"] for tool in options.tools)
        self._ends = tuple(each for each in (self.key, self.call_end, self.section_end) if each)
        self._value_ends = tuple(dict.fromkeys(pad + end for end in self.value_ends for pad in (self.padding, "")))
        super().__init__(answer, options)

    def _one(self) -> Steps[None]:
        reader = self._reader
        header, marker = yield from reader.before(self.name_ends)
        name = _parts_of(header)[0]
        if not _NAME.fullmatch(name):
            raise Rejected
        self._start(name)
        if marker not in self._ends:
            if (yield from reader.skip_space()) == "{":
                marker = yield from reader.until((self.call_end,), self._arguments)
                self._is_open = not marker
                return
            marker = yield from reader.until(self._ends, self._content)
        yield from self._parameters(name, marker)

    def _parameters(self, name: str, marker: str) -> Steps[None]:
        reader, opening = self._reader, "{"
        while marker == self.key:
            header, _ = yield from reader.before((self.key_end,))
            if self.value:
                yield from reader.skip_space()
                yield from reader.expect(self.value)
            key, stated = _parts_of(header)
            self._arguments(f"{opening}{quoted(key)}: ")
            opening = ", "
            if self.padding:
                yield from reader.literal(self.padding)
            types = _STATED[stated] if stated else types_of(self.options.tools, name, key)
            value = Value(types, self._arguments)
            marker = (yield from reader.until(self._value_ends, value.add)).removeprefix(self.padding)
            if not marker:
                value.cut()
                return
            value.end()
            if marker == self.value_ends[0]:
                marker = yield from reader.until(self._ends, self._content)
        if marker:
            self._arguments("{}" if opening == "{" else "}")
            self._is_open = False


class Qwen3CoderParser(TagParser):
    """Reads the calls of Qwen3-Coder and Qwen3.5."""

    section, section_end = special_tokens = ("<tool_call>", "</tool_call>")
    call, call_end, key = "<function=", "</function>", "<parameter="
    value_ends = ("</parameter>", "<parameter=", "</function>", "</tool_call>")
    padding = "\n"
    form = CallForm(f"{section}\n{call}", ">\n", f"{call_end}\n{section_end}", separator="\n", is_json=False)


class Glm46Parser(TagParser):
    """Reads the calls of GLM 4.5 to 4.7."""

    call, call_end, key, key_end, value = "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>"
    value_ends = ("</arg_value>",)
    name_ends = (key, call_end)
    special_tokens = (call, call_end, key, key_end, value, *value_ends)
    form = CallForm(call, "", call_end, pattern=f"\\n|{key}", separator="\n", is_json=False)


class MiniMaxM2Parser(TagParser):
    """Reads the calls of MiniMax M2."""

    section, section_end = special_tokens = ("<minimax:tool_call>", "</minimax:tool_call>")
    markers = (section,)
    call, call_end, key = "<invoke name=", "</invoke>", "<parameter name="
    value_ends = ("</parameter>",)
    form = CallForm(
        f'{call}"', '">\n', call_end, section=(f"{section}\n", f"\n{section_end}"), separator="\n", is_json=False
    )


class DeepSeekV32Parser(TagParser):
    """Reads the calls of DeepSeek V3.2."""

    section, section_end = f"<{_DSML}function_calls>", f"</{_DSML}function_calls>"
    call, call_end, key = f"<{_DSML}invoke name=", f"</{_DSML}invoke>", f"<{_DSML}parameter name="
    value_ends = (f"</{_DSML}parameter>",)
    special_tokens = (_DSML,)
    form = CallForm(
        f'{call}"', '">\n', call_end, section=(f"{section}\n", f"\n{section_end}"), separator="\n", is_json=False
    )


def _parts_of(header: str) -> tuple[str, str | None]:
    """Return a header's name, without quotes, and the value of its `string`, None without it."""
    parts = _HEADER.fullmatch(header)
    assert parts is not None, "the pattern takes any text"
    return parts[1], parts[2]
