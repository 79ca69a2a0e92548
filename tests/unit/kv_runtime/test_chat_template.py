"""Chat templates: what they are given, that the sandbox is one, that rendering has bounds, and those of real models.

Source of the renderings of real models: transformers (`tests/golden/`).
"""

import json
from copy import deepcopy
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kv_runtime.text import chat_template
from kv_runtime.text.chat_messages import TextError, digest_of
from kv_runtime.text.chat_template import ChatTemplate
from kv_runtime.text.loading import load_text
from kv_runtime.text.template_sandbox import chat_environment
from kv_runtime.text.tokenizer_model import TokenizerText
from tests.support.amount import examples
from tests.support.paths import CHAT_TEMPLATES, RECORDINGS
from tests.unit.kv_runtime.model_files import LLAMA_TEMPLATE, llama_like, refused, write_model

USER: dict[str, Any] = {"role": "user", "content": "hi"}
FIRST = "messages[0].content"
PARTS: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {"bos_token": "<s>"})


# ---------------------------------------------------------------- what a template is given
def test_a_template_sees_documents_effort_and_the_clients_variables() -> None:
    source = "{{ documents[0].title }} {{ reasoning_effort }} {{ enable_thinking }} {{ bos_token }}"
    rendered = template(source).render(
        [USER], documents=[{"title": "t"}], reasoning_effort="high", template_kwargs={"enable_thinking": False}
    )
    assert rendered == "t high False <s>"


def test_what_is_not_given_is_not_defined() -> None:
    source = (
        "{{ reasoning_effort is defined }} {{ enable_thinking is defined }} {{ tools is none }} {{ documents is none }}"
    )
    assert template(source).render([USER]) == "False False True True"


def test_the_clients_variables_come_before_the_effort_and_the_special_tokens() -> None:
    source = "{{ reasoning_effort }}{{ bos_token }}"
    given = {"reasoning_effort": "low", "bos_token": "<b>"}
    assert template(source).render([USER], reasoning_effort="high", template_kwargs=given) == "low<b>"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "chat_template"])
def test_variables_that_the_rendering_sets_are_refused_by_name(name: str) -> None:
    error = refused(lambda: template("x").render([USER], template_kwargs={name: 1}))
    assert error.field == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        ("{{ messages[0].content }}.", "It is ", "It is "),
        ("{{ messages[0].content | trim }}.<end>", "It is ", "It is"),
        ("{{ messages[0].content | trim }}.<end>", "  It is", "It is"),
        ("It is {{ messages[0].content }}.", "It is", "It is It is"),
    ],
)
def test_a_continued_message_ends_the_text(source: str, content: str, expected: str) -> None:
    message = {"role": "assistant", "content": content}
    assert template(source).render([message], continue_final_message=True) == expected


def test_a_message_that_the_template_does_not_write_cannot_be_continued() -> None:
    message = {"role": "assistant", "content": "<think>x</think>", "tool_calls": [{"function": {"name": "f"}}]}
    error = refused(lambda: template("nothing").render([message], continue_final_message=True))
    assert error.field == "continue_final_message"


# ---------------------------------------------------------------- parts, or one string
@pytest.mark.parametrize(
    ("source", "is_list"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for p in m['content'] %}{{ p.text }};{% endfor %}{% endfor %}", True),
        ("{% for m in messages[1:] %}{% for p in m['content'] | list %}{{ p.text }};{% endfor %}{% endfor %}", True),
        (
            "{% set all = messages %}{% for m in all %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}",
            True,
        ),
        ("{% for m in messages %}{% set c = m.content %}{% for p in c %}{{ p.text }};{% endfor %}{% endfor %}", True),
        ("{% set m = messages[0] %}{% for p in m.content %}{{ p.text }};{% endfor %}", True),
        (
            "{% macro w(content) %}{% for p in content %}{{ p.text }};{% endfor %}{% endmacro %}{{ w(" + FIRST + ") }}",
            True,
        ),
        (
            "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c }}{% endfor %}{{ m.content }}{% endfor %}",
            False,
        ),
        ("{% for t in tools or [] %}{{ t.content }}{% endfor %}{{ messages[0].content }}", False),
    ],
)
def test_a_template_that_loops_over_parts_gets_them_and_others_one_string(source: str, is_list: bool) -> None:
    rendered = template(source).render([PARTS] if "[1:]" not in source else [USER, PARTS])
    assert rendered == ("a;b;" if is_list else "a\nb")


# ---------------------------------------------------------------- bounds
def test_a_chat_that_becomes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    long = template("{% for i in range(1000) %}{{ messages[0].content }}{% endfor %}")
    monkeypatch.setattr(chat_template, "RENDERED_CHARACTERS_MAX", 2000)
    assert long.render([USER]) == "hi" * 1000
    monkeypatch.setattr(chat_template, "RENDERED_CHARACTERS_MAX", 1999)
    error = refused(lambda: long.render([USER]))
    assert (error.field, error.allowed) == ("messages", "at most 1999")


def test_a_chat_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = count()
    monkeypatch.setattr(chat_template, "perf_counter", lambda: float(next(seconds)))
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}"
    error = refused(lambda: template(endless).render([USER]))
    assert error.allowed == "at most 5.0 s of rendering"
    assert next(seconds) < 10


@pytest.mark.parametrize(
    "endless",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in [1] %}{% if loop.last %}{% endif %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) if not i %}{% endfor %}" * 9,
        "{% macro m() %}{% for i in range(99999) %}{{ i }}{% endfor %}{% endmacro %}{{ m() }}{{ m() }}",
        "{% macro twice(n) %}{% if n %}{{ twice(n - 1) }}{{ twice(n - 1) }}{% endif %}{% endmacro %}{{ twice(60) }}",
        "{% for i in [[[]]] * 9 recursive %}{% if i %}{{ loop(i) }}{% else %}{{ loop([[[]]]) }}{% endif %}{% endfor %}",
    ],
)
def test_what_a_template_does_without_writing_is_bounded_too(monkeypatch: pytest.MonkeyPatch, endless: str) -> None:
    seconds = count()
    monkeypatch.setattr(chat_template, "perf_counter", lambda: float(next(seconds)))
    monkeypatch.setattr(chat_template, "RENDER_S", 100.0)
    error = refused(lambda: template(endless).render([USER]))
    assert error.allowed == "at most 100.0 s of rendering"
    assert next(seconds) < 110


# ---------------------------------------------------------------- the sandbox
EXPRESSIONS = [
    "m.role", "m['role']", "m.missing", "m['missing'] is defined", "m.missing is defined", "m.items()",
    "m.keys() | list", "m.get('role')", "m.get('x', 'y')", "m.content.startswith('<')",
    "m.content.split('</think>')[-1].lstrip()",
    "m.content.upper()", "m.content.replace('a', 'b', 1)", "m.content.missing", "m.content.strip(1)",
    "m.content | trim", "loop.index0", "loop.first", "loop.last", "loop.previtem", "loop.missing", "ns.a", "ns.missing",
    "m.content.format(1)", "'%s' | format(m.content)", "m.content.count('a') + loop.length", "loop.cycle('a', 'b')",
    "m['content'][1:2]", "m.content[0]", "m.content.join(['a', 'b'])", "m[0]",
    "m.tool_calls[0].function.arguments.city",
    "loop.changed(m.role)", "m.content.encode()", "m.update", "m.content.format_map({})",
    # what a sandbox forbids
    "''.__class__", "m.content.__class__", "m.__class__.__mro__", "loop.__init__", "ns.__class__", "self.__init__",
    "''.format.__globals__", "cycler.__init__.__globals__", "ns._Namespace__attrs", "'{0.__class__}'.format(1)",
    "m.content.strip.__self__", "m.items.__self__", "messages.append(1)", "m.update({})", "m.pop('role')",
]  # fmt: skip


@pytest.mark.parametrize("expression", EXPRESSIONS)
@settings(max_examples=examples(10))
@given(others=st.lists(st.sampled_from(EXPRESSIONS), max_size=3), content=st.text(max_size=8), strict=st.booleans())
@example(others=[], content="{1}", strict=False)
def test_the_sandbox_answers_as_the_plain_one(expression: str, others: list[str], content: str, strict: bool) -> None:
    body = "".join("{{ " + each + " }}|" for each in [*others, expression])
    source = "{% set ns = namespace(a=1) %}{% for m in messages %}{% set ns.a = loop.index %}" + body + "{% endfor %}"
    call = {"function": {"name": "f", "arguments": {"city": "Ulm"}}}
    variables = {"messages": [{"role": "user", "content": content, "tool_calls": [call]}, {"role": "a", "items": 1}]}
    before = deepcopy(variables)
    plain, ours = ImmutableSandboxedEnvironment(), chat_environment()
    if strict:
        plain.undefined = ours.undefined = StrictUndefined
    assert outcome(ours, source, variables) == outcome(plain, source, variables)
    assert variables == before


def outcome(environment: ImmutableSandboxedEnvironment, source: str, variables: dict[str, Any]) -> str:
    """Return the rendered text, or the error."""
    try:
        return environment.from_string(source).render(variables)
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"


# ---------------------------------------------------------------- messages as engines read them
SEES = "{{ messages[0] | tojson(sort_keys=true) }}"


@pytest.mark.parametrize(
    ("message", "seen"),
    [
        ({"role": "user"}, {"role": "user", "content": ""}),
        ({"role": "tool", "content": None, "tool_call_id": "1"}, {"role": "tool", "content": "", "tool_call_id": "1"}),
        ({"role": "assistant", "content": None, "tool_calls": []}, {"role": "assistant", "content": ""}),
        ({"role": "function", "name": "f", "content": "1"}, {"role": "function", "name": "f", "content": "1"}),
        (
            {"role": "developer", "content": ["a", {"type": "input_text", "text": "b"}]},
            {"role": "developer", "content": "a\nb"},
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "assistant", "content": "no"},
        ),
        ({"role": "user", "content": "a", "refusal": None, "other": 1}, {"role": "user", "content": "a"}),
        (
            {"role": "assistant", "content": "a", "reasoning": "r"},
            {"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "r", "thinking": "r"},
        ),
        (
            {"role": "assistant", "content": "a", "reasoning_content": "r"},
            {"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "r", "thinking": "r"},
        ),
    ],
)  # fmt: skip
def test_a_message_is_seen_as_engines_give_it(message: dict[str, Any], seen: dict[str, Any]) -> None:
    assert json.loads(template(SEES).render([message])) == seen


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [('{"a": 1}', {"a": 1}), ("", {}), ("{", {}), ("[" * 100_000, {}), ({"a": 1}, {"a": 1}), (None, None)],
    ids=["an object", "blank", "cut off", "too deep", "no string", "null"],
)
def test_arguments_that_are_no_json_are_an_empty_object(arguments: object, seen: object) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    rendered = template(SEES).render([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert json.loads(rendered)["tool_calls"][0]["function"] == {"name": "f", "arguments": seen}


def test_a_template_may_write_the_day() -> None:
    day = datetime(2026, 3, 1)  # noqa: DTZ001 - local, as engines take it
    source = "{{ strftime_now('%d %b %Y') }}"
    assert ChatTemplate({"default": source}, {}, today=lambda: day).render([USER]) == "01 Mar 2026"


CHAT = [{"role": "user", "content": "hi"}]
OTHER = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(name="model")
def model_directory(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    return write_model(tmp_path / "model", llama_like(), LLAMA_TEMPLATE, bos_token="<|begin_of_text|>")


@pytest.fixture(name="other")
def other_template(tmp_path: Path) -> str:
    file = tmp_path / "other.jinja"
    file.write_text(OTHER)
    return str(file)


def test_chats_are_rendered_by_it_with_the_model_s_special_tokens(model: str, other: str) -> None:
    assert load_text(model, chat_template=other).render_chat(CHAT) == "<|begin_of_text|>hi"


def test_the_template_s_digest_follows_its_text_wherever_it_stands_and_the_tokenizer_s_does_not(
    model: str, other: str
) -> None:
    own, instead = load_text(model), load_text(model, chat_template=other)
    (Path(model) / "chat_template.jinja").write_text(OTHER)
    assert own.template_digest != instead.template_digest == load_text(model).template_digest
    assert own.tokenizer_digest == instead.tokenizer_digest


def test_a_directory_without_a_template_gets_one(model: str, other: str) -> None:
    (Path(model) / "tokenizer_config.json").write_text("{}")
    with pytest.raises(TextError, match="chat_template"):
        load_text(model).render_chat(CHAT)
    assert load_text(model, chat_template=other).render_chat(CHAT) == "hi"


def test_a_file_that_is_not_there_is_named(model: str) -> None:
    with pytest.raises(TextError, match=r"/nowhere\.jinja"):
        load_text(model, chat_template="/nowhere.jinja")


def test_the_byte_model_has_its_own(other: str) -> None:
    with pytest.raises(TextError, match=r"chat_template: found .*, allowed none"):
        load_text("byte", chat_template=other)


def test_the_begin_token_is_the_template_s(model: str) -> None:
    text = load_text(model)
    assert isinstance(text, TokenizerText)
    assert text.bos_id == text.special_ids["<|begin_of_text|>"]
    assert load_text("byte").bos_id is None


GOLDEN = json.loads((RECORDINGS / "renderings.json").read_text())
DAY = datetime.fromisoformat(GOLDEN["day"])
SPECIAL = {"bos_token": "<BOS>", "eos_token": "<EOS>", "unk_token": "<UNK>", "pad_token": "<PAD>"}
OPTIONS = {"tools": "tools", "kwargs": "template_kwargs", "effort": "reasoning_effort"}

needs_templates = pytest.mark.skipif(not CHAT_TEMPLATES.is_dir(), reason=f"{CHAT_TEMPLATES} is absent")


def rendered(template: ChatTemplate, chat: dict[str, Any]) -> str:
    """Return the digest of the chat as text; empty where the template refuses it."""
    options: Any = {OPTIONS[key]: chat[key] for key in OPTIONS if chat.get(key)}
    try:
        return digest_of(template.render(chat["messages"], **options).encode())[:12]
    except TextError:
        return ""


@needs_templates
@pytest.mark.parametrize("name", GOLDEN["digests"])
def test_every_chat_is_rendered_as_transformers_does(name: str) -> None:
    chats = json.loads((CHAT_TEMPLATES / "chats.json").read_text())
    template = ChatTemplate({"default": (CHAT_TEMPLATES / name).read_text()}, SPECIAL, today=lambda: DAY)
    expected = dict(zip(GOLDEN["chats"], GOLDEN["digests"][name], strict=True))
    assert {chat: rendered(template, chats[chat]) for chat in chats} == expected
