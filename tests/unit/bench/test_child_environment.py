"""What a bench's child processes have of the environment."""

import asyncio
import sys

import pytest

from bench.processes import ChildProcess

PRINTS = "import os; print(sorted(os.environ.items()))"


@pytest.mark.parametrize(("command", "has_the_users"), [([sys.executable, "-c", PRINTS], True), (["env"], False)])
async def test_our_programs_have_the_users_but_no_settings_and_others_what_they_need(
    command: list[str], monkeypatch: pytest.MonkeyPatch, *, has_the_users: bool
) -> None:
    monkeypatch.setenv("KVROUTER_CONTROL__TOKEN", "of a setting")
    monkeypatch.setenv("HF_TOKEN", "of the user")
    child = ChildProcess("child", command)
    async with asyncio.TaskGroup() as group:
        await child.start(group)
    assert "PATH" in child.output
    assert ("of the user" in child.output, "of a setting" in child.output) == (has_the_users, False)
