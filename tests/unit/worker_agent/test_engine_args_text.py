"""Files, JSON and flags as engine arguments: what they mean, where they say it, and what is told of bad ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from worker_agent.engine_args.findings import EngineArgsInvalid
from worker_agent.engine_args.layers import Layer
from worker_agent.engine_args.text import BYTES_MAX, DEPTH_MAX, VALUES_MAX, read_file, read_flags, read_json, typed


def told(read: Callable[[], Layer]) -> list[str]:
    with pytest.raises(EngineArgsInvalid) as error:
        read()
    return [str(finding) for finding in error.value.findings]


@pytest.fixture(name="yaml")
def yaml_file(tmp_path: Path) -> Callable[[str], Callable[[], Layer]]:
    def write(text: str) -> Callable[[], Layer]:
        file = tmp_path / "engine.yaml"
        file.write_text(text)
        return lambda: read_file(file, "file")

    return write


Yaml = Callable[[str], Callable[[], Layer]]


# ---------------------------------------------------------------- YAML
def test_every_name_of_a_file_knows_its_line(yaml: Yaml, tmp_path: Path) -> None:
    layer = yaml(
        "# comment\nmax_batch_size: 4\nkv_cache_config:\n  dtype: fp8\n  max_attention_window: [1,\n    2]\n"
    )()
    assert layer.values == {"max_batch_size": 4, "kv_cache_config": {"dtype": "fp8", "max_attention_window": [1, 2]}}
    file = tmp_path / "engine.yaml"
    assert layer.place_of(("max_batch_size",)) == f"{file}:2"
    assert layer.place_of(("kv_cache_config", "dtype")) == f"{file}:4"
    assert layer.place_of(("kv_cache_config", "unheard")) == f"{file}:3"


def test_aliases_and_merged_mappings_mean_what_they_mean_in_yaml(yaml: Yaml) -> None:
    text = "a: &one {x: 1, y: 1}\nb: &two {y: 2, z: 2}\nc: {<<: [*one, *two], z: 3}\nd: *one\ne: {z: 4, <<: *two}\n"
    values = yaml(text)().values
    assert values["c"] == {"x": 1, "y": 1, "z": 3}
    assert values["d"] == values["a"]
    assert values["d"] is not values["a"]
    assert values["e"] == {"y": 2, "z": 4}


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("a: [1, 2\nb: 3\n", ":2", "expected YAML, found expected ',' or ']'"),
        ("a: 1\n---\nb: 2\n", ":2", "expected YAML, found but found another document"),
        ("- a\n- b\n", ":1", "expected a mapping of arguments, found something else"),
        ("max_batch_size: 1\nmax_batch_size: 2\n", ":2", "expected a name, once, found 'max_batch_size' twice"),
        ("a:\n  b: 1\n  b: 2\n", ":3: a", "found 'b' twice"),
        ("a: 2024-01-01\n", ":1: a", "found a scalar of kind timestamp"),
        ("a: .nan\n", ":1: a", "found a scalar of kind float"),
        ("a: !!python/object:os.system x\n", ":1: a", "found a scalar of kind"),
        ("[1]: 2\n", ":1", "expected a name, once, found something that is no text"),
        ("1: 2\n", "", "expected arguments' names, found a name that is no text"),
        ("a: \0\n", "", "expected YAML, found unacceptable character"),
        ("a: &x [*x]\n", ":1", f"expected at most {VALUES_MAX} values, {DEPTH_MAX} deep, found more"),
        ("a: " + "[" * 5000, "", "expected YAML, found maximum recursion depth"),
        ("a: " + "9" * 5000, ":1: a", "found a scalar of kind int"),
    ],
)
def test_what_a_file_may_not_say_is_told_with_its_line(
    yaml: Yaml, tmp_path: Path, text: str, place: str, words: str
) -> None:
    (problem,) = told(yaml(text))
    assert problem.startswith(f"{tmp_path / 'engine.yaml'}{place}: ")
    assert words in problem


def test_aliases_do_not_multiply_without_bound(yaml: Yaml) -> None:
    lists = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 12))
    assert "values, 32 deep, found more" in told(yaml(f"l0: &l0 [1]\n{lists}"))[0]
    merged = "".join(f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}]}}\n" for n in range(1, 12))
    assert "values, 32 deep, found more" in told(yaml(f"m0: &m0 {{a: 1}}\n{merged}"))[0]


def test_all_problems_of_a_file_are_told(yaml: Yaml) -> None:
    assert len(told(yaml("a: .inf\nb: 2024-01-01\na: 1\n"))) == 3


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "no.yaml"
    assert told(lambda: read_file(missing, "file")) == [
        f"{missing}: expected a readable file in UTF-8, found No such file or directory"
    ]
    assert told(lambda: read_file(tmp_path, "file")) == [
        f"{tmp_path}: expected a readable file in UTF-8, found Is a directory"
    ]
    odd = tmp_path / "odd.yaml"
    odd.write_bytes(b"a: \xff\n")
    assert "expected a readable file in UTF-8" in told(lambda: read_file(odd, "file"))[0]
    odd.write_bytes(b"#" * (BYTES_MAX + 1))
    assert f"expected at most {BYTES_MAX} bytes" in told(lambda: read_file(odd, "file"))[0]


# ---------------------------------------------------------------- JSON
def test_an_object_is_the_override_layer() -> None:
    layer = read_json('{"kv_cache_config": {"dtype": "fp8"}}', "--override-engine-args", "override")
    assert (layer.name, layer.values) == ("override", {"kv_cache_config": {"dtype": "fp8"}})
    assert layer.place_of(("kv_cache_config", "dtype")) == "--override-engine-args"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1, column 1: expected JSON, found Expecting value"),
        ('{"a": 1,\n "b" 2}', "line 2, column 6: expected JSON, found Expecting ':' delimiter"),
        ("[1]", "--override-engine-args: expected a JSON object, found a list"),
        ('{"a": NaN}', "expected JSON, found NaN, which JSON does not have"),
        ('{"a": {"b": 1, "b": 2}}', "expected JSON, found 'b' twice in one object"),
        ('{"a": ' + "[" * 100_000, "found more"),
        ('{"a": ' + "9" * 5000 + "}", "expected JSON, found Exceeds the limit"),
    ],
)
def test_what_the_override_may_not_be_is_told(text: str, words: str) -> None:
    (problem,) = told(lambda: read_json(text, "--override-engine-args", "override"))
    assert words in problem


# ---------------------------------------------------------------- flags
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("none", None),
        ("null", None),
        ("true", True),
        ("False", False),
        ("7", 7),
        ("+3", 3),
        ("0.5", 0.5),
        ("fp8", "fp8"),
        ("[1]", "[1]"),
        ("9" * 31, float("9" * 31)),
    ],
)
def test_a_flag_s_value_has_the_type_that_it_looks_like(text: str, value: Any) -> None:
    found = typed(text, ("some", "path"))
    assert (found, type(found)) == (value, type(value))


def test_null_is_a_word_where_it_is_one_of_the_choices() -> None:
    assert typed("null", ("kv_cache_config", "kv_events_config", "publisher")) == "null"
    assert typed("null", ("revision",)) is None


def test_flags_make_nested_values_each_with_its_own_place() -> None:
    layer = read_flags(["--trtllm.a.b.c", "-1", "--trtllm.a.b.d=x=y", "--trtllm.e", "none"], "override")
    assert layer.values == {"a": {"b": {"c": -1, "d": "x=y"}}, "e": None}
    assert layer.place_of(("a", "b", "d")) == "--trtllm.a.b.d"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trtllm.a"], "--trtllm.a: expected a value behind it, found nothing"),
        (["--trtllm.a", "--trtllm.b"], "--trtllm.a: expected a value behind it, found nothing"),
        (["--trtllm.a", "1", "--trtllm.a", "2"], "--trtllm.a: expected one flag for a path, found an earlier flag"),
        (["--trtllm.a", "1", "--trtllm.a.b", "2"], "--trtllm.a.b: expected one flag for a path"),
        (["--trtllm.a.b", "1", "--trtllm.a", "2"], "--trtllm.a: expected one flag for a path"),
        (
            ["--trtllm.a..b", "1"],
            "--trtllm.a..b: expected --trtllm.a.b.c, of letters, digits and _, found no such path",
        ),
        (["--trtllm.", "1"], "found no such path"),
        (["--trtllm." + "a." * DEPTH_MAX + "a", "1"], "found no such path"),
        (["--bogus"], "--bogus: expected this command's options, or --trtllm.a.b.c VALUE, found no option"),
        (
            ["hunter2"],
            "arguments: expected this command's options, or --trtllm.a.b.c VALUE, found a value that belongs",
        ),
    ],
)
def test_what_a_flag_may_not_be_is_told(arguments: list[str], words: str) -> None:
    problem = told(lambda: read_flags(arguments, "override"))[0]
    assert words in problem
    assert "hunter2" not in problem
