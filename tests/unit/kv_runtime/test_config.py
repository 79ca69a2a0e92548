"""Configuration: which source wins, that all problems are reported together, and that no report shows a secret."""

import os
import re
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from pydantic import Field, SecretStr

from kv_runtime.config.loading import ConfigurationError, load_settings, load_yaml
from kv_runtime.config.rendering import render
from kv_runtime.config.sections import ControlSection, EmbeddedNatsSection, IndexSection, NatsSection, Section, Settings

NO_ASSIGNMENT = "--set: found no name before a =, allowed section.key=value"


class InnerSection(Section):
    level: int = Field(0, ge=0, le=9)


class PolicySection(Section):
    temperature: float = Field(0.5, ge=0)
    mode: Literal["kv", "round-robin"] = "kv"
    names: list[str] = Field(default_factory=list)
    inner: InnerSection = InnerSection()


class Tree(Settings):
    policy: PolicySection = PolicySection()
    nats: EmbeddedNatsSection = EmbeddedNatsSection()
    control: ControlSection = ControlSection()


class AgentTree(Settings):
    control: ControlSection = ControlSection(port=8003)
    nats: NatsSection = NatsSection(url="nats://127.0.0.1:4222")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("KVROUTER_"):
            monkeypatch.delenv(name)


def file_with(directory: Path, text: str) -> Path:
    path = directory / "config.yaml"
    path.write_text(text)
    return path


def problems(file: Path | None = None, *assignments: str, **flags: object) -> list[str]:
    with pytest.raises(ConfigurationError) as raised:
        load_settings(Tree, file=file, assignments=assignments, flags={"nats.port": flags.get("port")})
    assert str(raised.value) == "\n".join(["configuration:", *(f"  {problem}" for problem in raised.value.problems)])
    return raised.value.problems


# ---------------------------------------------------------------- which source wins


def test_without_sources_the_defaults_hold() -> None:
    assert load_settings(Tree) == Tree.model_construct()


@pytest.mark.parametrize(
    ("file", "environment", "assignments", "flag", "expected"),
    [
        ("1", None, (), None, 1),
        ("1", "2", (), None, 2),
        ("1", "2", ("nats.port=3",), None, 3),
        ("1", "2", ("nats.port=3", "nats.port=4"), None, 4),
        ("1", "2", ("nats.port=3",), 5, 5),
        ("1", "2", ("nats.port=3",), 0, 0),
        (None, None, (), 5, 5),
    ],
)
def test_a_flag_beats_an_assignment_which_beats_the_environment_which_beats_the_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str | None,
    environment: str | None,
    assignments: tuple[str, ...],
    flag: int | None,
    expected: int,
) -> None:
    path = None if file is None else file_with(tmp_path, f"nats: {{port: {file}}}\n")
    if environment is not None:
        monkeypatch.setenv("KVROUTER_NATS__PORT", environment)
    settings = load_settings(Tree, file=path, assignments=assignments, flags={"nats.port": flag, "nats.url": None})
    assert settings.nats.port == expected


def test_sources_are_merged_field_by_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVROUTER_POLICY__TEMPERATURE", "0.25")
    monkeypatch.setenv("kvrouter_policy__inner__level", "3")
    settings = load_settings(
        Tree,
        file=file_with(tmp_path, "policy: {mode: round-robin, temperature: 9}\nnats: {url: 'nats://a:1'}\n"),
        assignments=["policy.names=[a, b]"],
    )
    expected = PolicySection(temperature=0.25, mode="round-robin", names=["a", "b"], inner=InnerSection(level=3))
    assert (settings.policy, settings.nats.url) == (expected, "nats://a:1")


def test_a_section_in_one_variable_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVROUTER_POLICY", '{"temperature": 0.25, "inner": {"level": 3}}')
    monkeypatch.setenv("KVROUTER_POLICY__INNER__LEVEL", "4")
    settings = load_settings(Tree)
    assert (settings.policy.temperature, settings.policy.inner.level) == (0.25, 4)


@pytest.mark.parametrize("is_in_environment", [True, False])
def test_a_section_given_as_a_mapping_leaves_what_it_does_not_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_environment: bool
) -> None:
    file = file_with(tmp_path, "policy: {mode: round-robin, names: [a], inner: {level: 3}}\n")
    text = '{"temperature": 0.25, "inner": {}}'
    if is_in_environment:
        monkeypatch.setenv("KVROUTER_POLICY", text)
    settings = load_settings(Tree, file=file, assignments=() if is_in_environment else [f"policy={text}"])
    expected = PolicySection(mode="round-robin", names=["a"], temperature=0.25, inner=InnerSection(level=3))
    assert settings.policy == expected


def test_an_assignment_of_nothing_is_the_empty_text(tmp_path: Path) -> None:
    settings = load_settings(Tree, file=file_with(tmp_path, "nats: {url: 'nats://a:1'}\n"), assignments=["nats.url="])
    assert settings.nats.url == ""


@pytest.mark.parametrize("text", ["", "# nothing but words\n", "---\n", "nats:\n# port: 1\n"])
def test_an_empty_file_or_section_says_nothing(tmp_path: Path, text: str) -> None:
    assert load_settings(Tree, file=file_with(tmp_path, text)) == load_settings(Tree)


# ---------------------------------------------------------------- what is wrong


def test_every_problem_is_told_at_once_with_its_path_what_was_found_and_what_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVROUTER_POLICY__INNER__LEVEL", "10")
    monkeypatch.setenv("KVROUTER_NOPE", "1")
    monkeypatch.setenv("KVROUTER_POLICY__NOPE", "1")
    file = file_with(tmp_path, "policy: {temperature: -1, mode: best}\nnonsense: {}\nnats: {prot: 1}\n")
    assert sorted(problems(file, "nats.port=x", "words")) == [
        NO_ASSIGNMENT,
        "KVROUTER_NOPE: unknown; allowed: policy, nats, control",
        "KVROUTER_POLICY__NOPE: unknown; allowed: temperature, mode, names, inner; nearest: policy.mode",
        "nats.port: found 'x', allowed a whole number",
        f"nats.prot: unknown; allowed: {', '.join(EmbeddedNatsSection.model_fields)}; nearest: nats.port",
        "nonsense: unknown; allowed: policy, nats, control",
        "policy.inner.level: found '10', allowed 9 or less",
        "policy.mode: found 'best', allowed 'kv' or 'round-robin'",
        "policy.temperature: found -1, allowed 0 or more",
    ]


@pytest.mark.parametrize(
    "name", ["KVROUTER_", "KVROUTER_NATS__", "KVROUTER___PORT", "KVROUTER_NATS__PROT", "KVROUTER_X__Y"]
)
def test_a_variable_that_means_nothing_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    assert any(problem.startswith(f"{name}: unknown; allowed: ") for problem in problems())


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("polcy.mode=kv", "polcy: unknown; allowed: policy, nats, control; nearest: policy"),
        ("policy.mod=kv", "policy.mod: unknown; allowed: temperature, mode, names, inner; nearest: policy.mode"),
        ("policy.inner.levl=1", "policy.inner.levl: unknown; allowed: level; nearest: policy.inner.level"),
        ("mode=kv", "mode: unknown; allowed: policy, nats, control; nearest: policy.mode"),
        *((each, NO_ASSIGNMENT) for each in ("nats.port", "", "=", "=1", " = 1")),
        *((f"nats.port={null}", "nats.port: found None, allowed a whole number") for null in ("null", "~")),
    ],
)
def test_an_assignment_that_may_not_be_is_named_with_what_is_allowed(assignment: str, expected: str) -> None:
    assert problems(None, assignment) == [expected]


@pytest.mark.parametrize("value", ["not json", "", "[1"])
def test_a_section_variable_that_is_no_json_is_named_with_the_other_problems(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("KVROUTER_POLICY", value)
    monkeypatch.setenv("KVROUTER_NATS__PORT", "x")
    found = problems(None, "policy.temperature=-1")
    assert [problem.partition(":")[0] for problem in found] == ["KVROUTER_POLICY", "policy.temperature", "nats.port"]


def test_an_assignment_that_is_no_yaml_names_its_path() -> None:
    (problem,) = problems(None, "policy.names=[a")
    assert problem.startswith("--set policy.names: ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nats: {port: 1", "while parsing a flow mapping"),
        ("\tnats:\n", "cannot start any token"),
        ("nats: *unknown\n", "undefined alias"),
        ("[1]: 2\n", "line 1, column 1: while constructing a mapping, found unhashable key"),
        ("!!python/object:os.system {}\n", "could not determine a constructor"),
        ("- nats\n", "found list, allowed a mapping of sections"),
        ("nats\n", "found str, allowed a mapping of sections"),
        ("nats:\n  port: 1 : 2\n", "line 2, column 11: mapping values are not allowed here"),
        (f"nats: {{port: {'9' * 5000}}}", "line 1, column 14: found a value that its type does not allow"),
        ("nats: 2020-13-01", "found a value that its type does not allow"),
        ("nats: !!bool x", "found a value that its type does not allow"),
        ("nats: \x01", "found character #x0001: special characters are not allowed"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path, text: str, words: str) -> None:
    file = file_with(tmp_path, text)
    file_problem, other = problems(file, "nats.port=-1")
    assert file_problem.startswith(f"{file}: ")
    assert words in file_problem
    assert other.startswith("nats.port: found -1, ")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("nats:\n  port: 1\n  user: a\n  port: 2\n", "line 4, column 3: found port again, allowed once"),
        ("nats: {port: 1}\nnats: {user: a}\n", "line 2, column 1: found nats again, allowed once"),
        ("nats:\n  user: a\n  'user': b\n", "line 3, column 3: found user again, allowed once"),
        ("nats: [{port: 1, port: 2}]\n", "line 1, column 18: found port again, allowed once"),
    ],
)
def test_a_key_that_stands_twice_in_a_file_is_refused_with_its_line(tmp_path: Path, text: str, found: str) -> None:
    file = file_with(tmp_path, text)
    assert problems(file) == [f"{file}: {found}"]


def test_a_key_may_stand_once_in_each_section_and_beside_a_merged_one(tmp_path: Path) -> None:
    text = "nats: &defaults {port: 1, user: a}\n"
    assert load_yaml(f"{text}other:\n  <<: *defaults\n  port: 2\n") == {
        "nats": {"port": 1, "user": "a"},
        "other": {"port": 2, "user": "a"},
    }
    assert load_settings(Tree, file=file_with(tmp_path, text)).nats.port == 1


def test_a_file_that_is_not_there_or_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, words in (("absent", "No such file"), ("", "Is a directory"), ("binary", "decode")):
        (problem,) = problems(tmp_path / name)
        assert problem.startswith(f"{tmp_path / name}: ")
        assert words in problem


@pytest.mark.parametrize(
    ("text", "path"), [("nats: 7\n", "nats"), ("nats: []\n", "nats"), ("1: {}\n", "1"), ("nats: {1: 2}\n", "nats.1")]
)
def test_a_section_that_is_none_is_named(tmp_path: Path, text: str, path: str) -> None:
    (problem,) = problems(file_with(tmp_path, text))
    assert problem.startswith(f"{path}: ")


# ---------------------------------------------------------------- secrets


def test_a_shown_tree_loads_again(tmp_path: Path) -> None:
    settings = load_settings(Tree, assignments=["policy.names=[a]", "nats.url=nats://a:1", "policy.temperature=0.125"])
    assert load_settings(Tree, file=file_with(tmp_path, render(settings))) == settings


def test_what_differs_from_its_default_is_shown_first() -> None:
    shown: Any = load_yaml(render(load_settings(Tree, assignments=["control.host=::1", "policy.inner.level=3"])))
    assert list(shown) == ["policy", "control", "nats"]
    assert list(shown["policy"]) == ["inner", "temperature", "mode", "names"]
    assert next(iter(shown["control"])) == "host"


@pytest.mark.parametrize("url", ["nats://user:hunter2@host:4222", "nats://hunter2@host:4222,nats://u:hunter2@other:1"])
def test_the_user_of_a_url_is_not_shown(url: str) -> None:
    shown = render(load_settings(Tree, flags={"nats.url": url}))
    assert "hunter2" not in shown
    assert "@host:4222" in shown


def test_a_shown_tree_masks_secrets_and_a_mask_is_none(tmp_path: Path) -> None:
    shown = render(load_settings(Tree, assignments=["control.token=hunter2", "nats.credentials=hunter2"]))
    assert "hunter2" not in shown
    assert set(yaml.safe_load(shown)["control"]["token"]) == {"*"}
    assert problems(file_with(tmp_path, shown)) == [
        "nats.credentials: found the mask of a shown secret, allowed the secret itself",
        "control.token: found the mask of a shown secret, allowed the secret itself",
    ]


KEYS = "nats.fleet_keys=[hunter2-hunter2-, hunter2-hunter2+]"


def test_a_list_of_secrets_is_masked_and_its_masks_are_refused(tmp_path: Path) -> None:
    settings = load_settings(Tree, assignments=[KEYS])
    assert settings.nats.fleet_secrets == (b"hunter2-hunter2-", b"hunter2-hunter2+")
    assert "hunter2" not in (shown := render(settings))
    assert problems(file_with(tmp_path, shown)) == ["nats.fleet_keys: key 0 has fewer than 16 characters"]


@pytest.mark.parametrize("keys", ["[hunter2]", "hunter2", "[hunter2-hunter2-, {a: hunter2}]", "[9999999999999999]"])
def test_a_list_with_what_is_no_secret_is_refused_and_not_shown(keys: str) -> None:
    (problem,) = problems(None, f"nats.fleet_keys={keys}")
    assert problem.startswith("nats.fleet_keys")
    assert not re.search("hunter2|9999", problem)


def test_a_secret_of_digits_is_a_secret() -> None:
    settings = load_settings(Tree, assignments=["control.token=123456"])
    assert settings.control.token == SecretStr("123456")


@pytest.mark.parametrize("text", ["[hunter2]", "{a: hunter2}"])
@pytest.mark.parametrize("field", ["nats.credentials", "control.token", "control", "nats"])
def test_no_problem_shows_a_secret(field: str, text: str) -> None:
    (problem, *_) = found = problems(None, f"{field}={text}")
    assert problem.startswith(field)
    assert "hunter2" not in "".join(found)


UNREADABLE = [
    "control:\n  token: hunter2 : x\n",
    "control: {token: *hunter2}",
    "control: {token: !hunter2 x}",
    "control: {token: !hunter2!x y}",
    "control: {token: 'hunter2",
    "control: {token: &hunter2 1, a: &hunter2 2}",
    "control: {token: @hunter2}",
    "control: {token: !!int hunter2}",
    "control: {token:hunter2}",
    "{[hunter2]: {port: 1, port: 2}}",
    "hunter2",
]


@pytest.mark.parametrize("text", UNREADABLE)
def test_no_text_that_cannot_be_read_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("KVROUTER_CONTROL", '{"token": "hunter2" x')
    value = text.partition("control:")[2] or text
    found = problems(file_with(tmp_path, text), f"control={value}", "hunter2", "control.token:hunter2")
    assert len(found) >= 4
    assert "hunter2" not in "".join(found)


@pytest.mark.parametrize("password", ["hunter2", "hun/ter2", "h@unter2", "hu?n@/ter2"])
def test_a_password_in_an_address_is_not_shown(password: str) -> None:
    (problem,) = problems(None, f'nats.url="nats://a:{password}@h\\n"')
    assert problem.startswith("nats.url: found 'nats://**********@h")


def test_an_environment_that_is_nested_too_deeply_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVROUTER_CONTROL", "[" * 100_000)
    assert problems(None)[0].startswith("KVROUTER_CONTROL: allowed JSON")


def test_a_control_plane_beyond_loopback_wants_a_token_and_the_problem_is_short() -> None:
    assert problems(None, "control.host=0.0.0.0") == ["control: host is 0.0.0.0: beyond loopback a token is required"]
    assert load_settings(Tree, assignments=["control.host=0.0.0.0", "control.token=x"]).control.token


# ---------------------------------------------------------------- flags


def test_a_process_s_own_defaults_stand_beside_what_is_given_of_their_section(tmp_path: Path) -> None:
    file = file_with(tmp_path, "control: {host: '::1'}\n")
    tree = load_settings(AgentTree, file=file, assignments=["nats.credentials=x"])
    assert (tree.control.host, tree.control.port, tree.nats.url) == ("::1", 8003, "nats://127.0.0.1:4222")
    assert load_settings(AgentTree, flags={"control.port": 9}).control.port == 9
    with pytest.raises(ConfigurationError, match="control: "):
        load_settings(AgentTree, assignments=["control=5"])


# ---------------------------------------------------------------- what an index may be


class IndexTree(Settings):
    index: IndexSection = IndexSection()


def test_an_index_has_no_limit_or_room_for_some_ranks() -> None:
    for allowed in (0, 1 << 20, 1 << 44):
        assert IndexSection(memory_bytes_max=allowed).memory_bytes_max == allowed
    for refused in (1, (1 << 20) - 1):
        message = rf"index\.memory_bytes_max: found {refused}, .*0 \(no limit\) or 1048576 and more are allowed$"
        with pytest.raises(ConfigurationError, match=message):
            load_settings(IndexTree, assignments=[f"index.memory_bytes_max={refused}"])
