"""The distribution and an engine fit into one environment."""

import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.support.engine_requirements import DIRECTORY, ENGINES, PYTHON, overlap, required_by, required_with_pins
from tests.support.paths import ROOT
from tests.support.requirements import declared

UV = Path(sys.executable).with_name("uv")
LEFT_OUT = {
    "certifi>=2026.10.19",  # vLLM 0.33 wants a release that a mirror may not have yet
    "flashinfer-python==0.2.5",  # TensorRT-LLM 1.0 pins a release without wheels
    "llist",  # no wheels
    "tensorrt",  # PyPI has no wheels of the releases that TensorRT-LLM wants
}
"""Requirements, or names, that a resolver cannot read without building them, or that a mirror lacks."""
ABSENT = ("error sending request", "Failed to fetch", "Could not connect", "dns error")


def refused(engine: str) -> list[str]:
    """Return those of our requirements that no version fits together with the engine's."""
    theirs: dict[str, list[SpecifierSet]] = {}
    for each in required_with_pins(engine):
        theirs.setdefault(canonicalize_name(each.name), []).append(each.specifier)
    return [
        f"{each}, {engine} wants {', '.join(map(str, found))}"
        for each in declared("router")
        if (found := theirs.get(canonicalize_name(each.name), [])) and not overlap(each.specifier, *found)
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_no_range_of_ours_excludes_a_range_of_an_engine(engine: str) -> None:
    assert refused(engine) == []


@pytest.mark.parametrize("engine", ENGINES)
def test_what_an_engine_requires_has_a_source(engine: str) -> None:
    lines = (DIRECTORY / f"{engine}.txt").read_text().splitlines()
    assert lines[1].startswith(f"# source: PyPI, {engine.replace('tensorrt-llm', 'tensorrt_llm')}")
    assert len(required_by(engine)) > 30


def test_ranges_that_exclude_each_other_are_found() -> None:
    assert not overlap(SpecifierSet(">=2.4,<3"), SpecifierSet("<2"))
    assert not overlap(SpecifierSet(">=0.23.1"), SpecifierSet("<=0.23.0,>=0.22.0"))
    assert overlap(SpecifierSet(">=1.26,<3"), SpecifierSet("<2.4,>=2.0.0"), SpecifierSet("<2.5,>=1.22"))


@pytest.mark.slow
@pytest.mark.skipif(not UV.exists(), reason="uv is not installed: `make .venv/.ready`")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_resolver_finds_one_environment_for_both(engine: str, tmp_path: Path) -> None:
    theirs = [each for each in required_by(engine) if not {each.name, str(each)} & LEFT_OUT]
    wanted = [*declared("router"), *theirs]
    (tmp_path / "wanted.in").write_text("\n".join(map(str, wanted)))
    platform = ["--python-version", PYTHON, "--python-platform", "x86_64-manylinux_2_34", "--only-binary", ":all:"]
    command = [str(UV), "pip", "compile", "--quiet", "--no-config", *platform, str(tmp_path / "wanted.in")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=110)
    if any(word in done.stderr for word in ABSENT):
        pytest.skip("no package registry answers")
    assert done.returncode == 0, done.stderr
    assert "tokenizers==" in done.stdout
