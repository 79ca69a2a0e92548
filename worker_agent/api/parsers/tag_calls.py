r"""Calls with a tag for each parameter; they become JSON by the types of the request's tools (`values.py`).

    Qwen3-Coder, Qwen3.5    <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n ...
                            </function>\n</tool_call>
    GLM 4.5, 4.6            <tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n ... </tool_call>
    GLM 4.7                 the same without line ends
    MiniMax M2              <minimax:tool_call>\n<invoke name="NAME">\n<parameter name="KEY">VALUE</parameter>\n ...
                            </invoke>\n ... </minimax:tool_call>
    DeepSeek V3.2           the same with <|DSML|function_calls>, <|DSML|invoke ...>, <|DSML|parameter ...> (U+FF5C for
                            the bars), where string="true" or "false" says whether VALUE is text or JSON

Behind its name a call may also have all arguments in one JSON object, which is passed on as written. For Qwen one line
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
from collections.abc import Sequence
from typing import NamedTuple

from worker_agent.api.parsers.calls import NAME_CHARACTERS_MAX, CallId, SectionParser
from worker_agent.api.parsers.reader import Rejected, Steps
from worker_agent.api.parsers.values import ANY, EXACT, Tool, Value, quoted, types_of

_NAME = re.compile(r"""[^\s<>{}"']+""")
_HEADER = re.compile(r"""\s*["']?(.*?)["']?(?:\s+string=["']?(true|false)["']?)?\s*""", re.DOTALL)

_STATED = {"true": EXACT, "false": ANY}


class TagForm(NamedTuple):
    """The tags of one family. The text from `call` or `key` to the end that it has is a header: a name, maybe quoted.

    `value` stands behind a key's end, if there is such a tag. `value_ends` are followed or preceded by `padding`.
    """

    call: str
    call_end: str
    key: str
    value_ends: tuple[str, ...]
    section: str = ""
    section_end: str = ""
    has_bare_calls: bool = False
    name_ends: tuple[str, ...] = (">",)
    key_end: str = ">"
    value: str = ""
    padding: str = ""
    special_tokens: tuple[str, ...] = ()


QWEN3_CODER = TagForm(
    section="<tool_call>",
    section_end="</tool_call>",
    has_bare_calls=True,
    call="<function=",
    call_end="</function>",
    key="<parameter=",
    value_ends=("</parameter>", "<parameter=", "</function>", "</tool_call>"),
    padding="\n",
    special_tokens=("<tool_call>", "</tool_call>"),
)
GLM46 = TagForm(
    call="<tool_call>",
    call_end="</tool_call>",
    key="<arg_key>",
    value_ends=("</arg_value>",),
    name_ends=("<arg_key>", "</tool_call>"),
    key_end="</arg_key>",
    value="<arg_value>",
    special_tokens=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
MINIMAX_M2 = TagForm(
    section="<minimax:tool_call>",
    section_end="</minimax:tool_call>",
    call="<invoke name=",
    call_end="</invoke>",
    key="<parameter name=",
    value_ends=("</parameter>",),
    special_tokens=("<minimax:tool_call>", "</minimax:tool_call>"),
)
_DSML = "\uff5cDSML\uff5c"
DEEPSEEK_V32 = TagForm(
    section=f"<{_DSML}function_calls>",
    section_end=f"</{_DSML}function_calls>",
    has_bare_calls=True,
    call=f"<{_DSML}invoke name=",
    call_end=f"</{_DSML}invoke>",
    key=f"<{_DSML}parameter name=",
    value_ends=(f"</{_DSML}parameter>",),
    special_tokens=(_DSML,),
)


class TagParser(SectionParser):
    """Reads the calls of one form. `tools` are those of the request."""

    def __init__(self, form: TagForm, call_id: CallId, tools: Sequence[Tool] = ()) -> None:
        self._form, self._tools = form, tools
        self.section, self.section_end, self.call = form.section, form.section_end, form.call
        self.markers = (form.section, form.call) if form.has_bare_calls else (form.section or form.call,)
        self.openings = (f"{form.section}\n{form.call}",) if form.section else _calls_of(form, tools)
        self._ends = tuple(each for each in (form.key, form.call_end, form.section_end) if each)
        self._value_ends = tuple(dict.fromkeys(pad + end for end in form.value_ends for pad in (form.padding, "")))
        super().__init__(call_id)

    def _one(self) -> Steps[None]:
        reader, form = self._reader, self._form
        header, marker = yield from reader.before(form.name_ends, NAME_CHARACTERS_MAX)
        name = _parts_of(header)[0]
        if not _NAME.fullmatch(name):
            raise Rejected
        self._start(name)
        if marker not in self._ends:
            if (yield from reader.skip_space()) == "{":
                marker = yield from reader.until((form.call_end,), self._arguments)
                self.has_open_call = not marker
                return
            marker = yield from reader.until(self._ends, self._content)
        yield from self._parameters(name, marker)

    def _parameters(self, name: str, marker: str) -> Steps[None]:
        reader, form, opening = self._reader, self._form, "{"
        while marker == form.key:
            header, _ = yield from reader.before((form.key_end,), NAME_CHARACTERS_MAX)
            if form.value:
                yield from reader.skip_space()
                yield from reader.expect(form.value)
            key, stated = _parts_of(header)
            self._arguments(f"{opening}{quoted(key)}: ")
            opening = ", "
            if form.padding:
                yield from reader.literal(form.padding)
            types = _STATED[stated] if stated else types_of(self._tools, name, key)
            value = Value(types, self._arguments)
            marker = (yield from reader.until(self._value_ends, value.add)).removeprefix(form.padding)
            if not marker:
                value.cut()
                return
            value.end()
            if marker == form.value_ends[0]:
                marker = yield from reader.until(self._ends, self._content)
        if marker:
            self._arguments("{}" if opening == "{" else "}")
            self._end()


def _parts_of(header: str) -> tuple[str, str | None]:
    """Return a header's name, without quotes, and what it says in `string`."""
    parts = _HEADER.fullmatch(header)
    assert parts is not None, "the pattern takes any text"
    return parts[1], parts[2]


def _calls_of(form: TagForm, tools: Sequence[Tool]) -> tuple[str, ...]:
    """Return how calls of the request's functions begin: the tag alone may be a word of a thought."""
    return tuple(form.call + tool["function"]["name"] for tool in tools)
