"""Files, JSON and flags as engine arguments: what they mean, where they say it, and what is told of bad ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from worker_agent.engine_args.layers import EngineArgsInvalid, Values, nested
from worker_agent.engine_args.sources import read_file, read_flags, read_json, typed


def told(read: Callable[[], Values]) -> list[str]:
    with pytest.raises(EngineArgsInvalid) as error:
        read()
    return [str(finding) for finding in error.value.findings]


@pytest.fixture(name="yaml")
def yaml_file(tmp_path: Path) -> Callable[[str], Callable[[], Values]]:
    def write(text: str) -> Callable[[], Values]:
        file = tmp_path / "engine.yaml"
        file.write_text(text)
        return lambda: read_file(file)

    return write


Yaml = Callable[[str], Callable[[], Values]]


def plain(values: Values) -> dict[str, Any]:
    return nested({path: each.value for path, each in values.items()})


# ---------------------------------------------------------------- YAML
def test_every_value_of_a_file_knows_its_line(yaml: Yaml, tmp_path: Path) -> None:
    layer = yaml(
        "# comment\nmax_batch_size: 4\nkv_cache_config:\n  dtype: fp8\n  max_attention_window: [1,\n    2]\n"
    )()
    file = tmp_path / "engine.yaml"
    assert [(each.name, each.value, each.origin) for each in layer.values()] == [
        ("max_batch_size", 4, f"file ({file}:2)"),
        ("kv_cache_config.dtype", "fp8", f"file ({file}:4)"),
        ("kv_cache_config.max_attention_window", [1, 2], f"file ({file}:5)"),
    ]


def test_aliases_and_merged_mappings_mean_what_they_mean_in_yaml(yaml: Yaml) -> None:
    text = "a: &one {x: 1, y: 1}\nb: &two {y: 2, z: 2}\nc: {<<: [*one, *two], z: 3}\nd: *one\ne: {z: 4, <<: *two}\n"
    values = plain(yaml(text)())
    assert values["c"] == {"x": 1, "y": 1, "z": 3}
    assert values["d"] == values["a"]
    assert values["e"] == {"y": 2, "z": 4}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1, 2\nb: 3\n", "expected YAML, found line 2, column 2: while parsing a flow sequence"),
        ("a: 1\n---\nb: 2\n", "expected YAML, found line 2, column 1: expected a single document"),
        ("- a\n- b\n", "expected a mapping, whose names are texts, found ['a', 'b'] (a list)"),
        ("max_batch_size: 1\nmax_batch_size: 2\n", "line 2, column 1: found max_batch_size again, allowed once"),
        ("1: 2\n", "expected a mapping, whose names are texts"),
    ],
)
def test_what_a_file_may_not_say_is_told(yaml: Yaml, tmp_path: Path, text: str, words: str) -> None:
    (problem,) = told(yaml(text))
    assert problem.startswith(f"{tmp_path / 'engine.yaml'}: ")
    assert words in problem


def test_an_empty_file_is_an_empty_layer(yaml: Yaml) -> None:
    assert yaml("# nothing\n")() == {}


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing, odd = tmp_path / "no.yaml", tmp_path / "odd.yaml"
    odd.write_bytes(b"a: \xff\n")
    assert told(lambda: read_file(missing)) == [
        f"{missing}: expected a readable file in UTF-8, found No such file or directory"
    ]
    assert "expected a readable file in UTF-8" in told(lambda: read_file(odd))[0]


# ---------------------------------------------------------------- JSON
def test_an_object_is_the_override_layer() -> None:
    layer = read_json('{"kv_cache_config": {"dtype": "fp8"}}')
    assert plain(layer) == {"kv_cache_config": {"dtype": "fp8"}}
    assert layer["kv_cache_config", "dtype"].origin == "override (--override-engine-args)"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected JSON, found Input data was truncated"),
        ('{"a": 1,\n "b" 2}', "expected JSON, found JSON is malformed: expected ':' (byte 14)"),
        ("[1]", "--override-engine-args: expected a mapping, whose names are texts, found [1] (a list)"),
        ('{"a": NaN}', "expected JSON, found JSON is malformed"),
        ('{"a": ' + "[" * 100_000, "expected JSON, found "),
    ],
)
def test_what_the_override_may_not_be_is_told(text: str, words: str) -> None:
    (problem,) = told(lambda: read_json(text))
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
    found = typed(text)
    assert (found, type(found)) == (value, type(value))


def test_flags_make_nested_values_each_with_its_own_place() -> None:
    layer = read_flags(["--trtllm.a.b.c", "-1", "--trtllm.a.b.d=x=y", "--trtllm.e", "none"])
    assert plain(layer) == {"a": {"b": {"c": -1, "d": "x=y"}}, "e": None}
    assert layer["a", "b", "d"].origin == "override (--trtllm.a.b.d)"


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
        (["--bogus"], "--bogus: expected this command's options, or --trtllm.a.b.c VALUE, found no option"),
        (
            ["hunter2"],
            "arguments: expected this command's options, or --trtllm.a.b.c VALUE, found a value that belongs",
        ),
    ],
)
def test_what_a_flag_may_not_be_is_told(arguments: list[str], words: str) -> None:
    problem = told(lambda: read_flags(arguments))[0]
    assert words in problem
    assert "hunter2" not in problem
