"""The fixture: nothing of the fake is there after a test; in child processes it is where it was asked for."""

import importlib
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.trtllm import FAKE_PATH, environment, installed
from tests.unit.tensorrt_llm_fake.told import engine, is_healthy


def test_nothing_is_left_behind() -> None:
    before = (list(sys.path), set(sys.modules), dict(os.environ), threading.active_count())
    with installed() as fake:
        llm = engine(fake, env_overrides={"SOME_VARIABLE": 1})
        assert is_healthy(llm)
        assert os.environ["SOME_VARIABLE"] == "1"
    assert (list(sys.path), dict(os.environ), threading.active_count()) == (before[0], before[2], before[3])
    assert not {name for name in set(sys.modules) - before[1] if name.startswith("tensorrt_llm")}
    assert "TRT-LLM" not in logging.Logger.manager.loggerDict
    assert not is_healthy(llm)


def test_a_module_that_imported_the_fake_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "an_engine_of_a_test.py").write_text("from tensorrt_llm import LLM\n")
    monkeypatch.syspath_prepend(tmp_path)
    with installed():
        importlib.import_module("an_engine_of_a_test")
    assert "an_engine_of_a_test" not in sys.modules


def test_each_use_begins_anew() -> None:
    with installed() as first:
        first.control.gpus = 1
    with installed() as second:
        assert (second.control.gpus, second.module is first.module) == (8, False)


def test_a_child_process_finds_the_fake_and_what_it_was_told() -> None:
    code = (
        "import tensorrt_llm, tensorrt_llm_fake_control as told;"
        "print(tensorrt_llm.__file__, told.control.gpus, told.control.model.gpu_blocks)"
    )
    variables = os.environ | environment(gpus=2, model={"gpu_blocks": 7})
    told = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True, timeout=60
    )
    assert told.stdout.split() == [str(FAKE_PATH / "tensorrt_llm" / "__init__.py"), "2", "7"]
