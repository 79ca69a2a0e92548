"""The Containerfiles: a linter's rules and ours. Their pip steps are replayed in an environment that has nothing."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.support.paths import ROOT

CONTAINERS = ROOT / "containers"
FILES = sorted(CONTAINERS.glob("*.Containerfile"), key=lambda path: path.name)
HADOLINT = Path(sys.executable).with_name("hadolint")
PUBLIC = re.compile(r"docker\.io/(library|vllm|lmsysorg)/[\w./-]+:[\w.-]+")
ANYWHERE = "0.0.0.0"  # noqa: S104 - what must not be there
SECRET = re.compile(r"(?i)token|password|secret|credential|api_?key")
NO_REGISTRY = ("NewConnectionError", "Failed to resolve", "Max retries exceeded")
COMMANDS = {"router.Containerfile": "router", "agent.Containerfile": "worker-agent"}
WITHOUT_COMPILER = {"router": (1, "router: the index's C++ extension is missing ("), "worker-agent": (0, "")}
"""Exit status, and begin of the error, where the wheel was built without a compiler, as it is here, to be quick."""
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return keyword and argument of each instruction, comments left out and continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    return [(keyword, rest) for line in joined.splitlines() if line for keyword, _, rest in (line.partition(" "),)]


def last(path: Path, keyword: str) -> str:
    return [rest for found, rest in instructions(path) if found == keyword][-1]


def arguments(path: Path) -> dict[str, str]:
    """Return the arguments of a build, and their values where none are given."""
    found = (rest.partition("=") for keyword, rest in instructions(path) if keyword == "ARG")
    return {name: value for name, _, value in found}


def test_there_is_one_for_the_router_and_one_for_the_agent() -> None:
    assert [path.name for path in FILES] == sorted(COMMANDS)


@every_file
@pytest.mark.skipif(not HADOLINT.exists(), reason="hadolint is not installed: `make .venv/.ready`")
def test_the_linter_finds_nothing(path: Path) -> None:
    done = subprocess.run([HADOLINT, "--no-color", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@every_file
def test_the_process_is_not_root_and_its_health_is_checked(path: Path) -> None:
    assert last(path, "USER") == "10001:10001"
    assert "/health" in last(path, "ENV")
    assert "HEALTH_URL" in last(path, "HEALTHCHECK")


@every_file
def test_images_are_arguments_with_public_names(path: Path) -> None:
    bases = {rest.split()[0] for keyword, rest in instructions(path) if keyword == "FROM"}
    assert bases
    for base in bases:
        assert PUBLIC.fullmatch(arguments(path)[base.removeprefix("${").removesuffix("}")])


@every_file
def test_nothing_listens_beyond_loopback_unless_an_argument_says_so(path: Path) -> None:
    assert [rest for _, rest in instructions(path) if ANYWHERE in rest] == []
    assert last(path, "ENTRYPOINT") == f'["{COMMANDS[path.name]}"]'


@every_file
def test_no_instruction_has_a_secret_or_another_registry(path: Path) -> None:
    assert [rest for _, rest in instructions(path) if SECRET.search(rest)] == []
    assert [rest for _, rest in instructions(path) if "index-url" in rest or "https:" in rest] == []


def pip_steps(path: Path) -> list[str]:
    steps = [step.strip() for keyword, rest in instructions(path) if keyword == "RUN" for step in rest.split("&&")]
    return [step for step in steps if " pip " in step]


@pytest.mark.slow
@every_file
def test_the_pip_steps_give_a_program_that_starts_or_says_what_it_lacks(path: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True, symlinks=True)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "constraints.txt").write_text((ROOT / "constraints.txt").read_text())
    programs = {
        **os.environ,
        **arguments(path),
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        "CXX": "/nonexistent/c++",
    }
    for step in pip_steps(path):
        command = step.replace("/wheels", str(wheels)).replace("/source", str(ROOT))
        done = subprocess.run(["bash", "-c", command], env=programs, capture_output=True, text=True, check=False)
        if any(word in done.stderr for word in NO_REGISTRY):
            pytest.skip("no package registry answers")
        assert done.returncode == 0, done.stderr
    name = COMMANDS[path.name]
    program = environment / "bin" / name
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, cwd=tmp_path)
    status, error = WITHOUT_COMPILER[name]
    assert (done.returncode, done.stderr[: len(error) or None]) == (status, error)
