"""`worker-agent print-engine-args` as typed: what it prints and logs, and what it ends with."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import Ended, forked

EXAMPLE = """\
# a prefill worker
kv_cache_config:
  dtype: fp8
  enable_block_reuse: false
max_batch_size: 64
num_postprocess_workers: 4
env_overrides: {HF_TOKEN: hunter2-hunter2}
"""


def run(*arguments: str) -> Ended:
    return forked("-m", "worker_agent", "print-engine-args", *arguments)


@pytest.fixture(name="file")
def engine_yaml(tmp_path: Path) -> Path:
    file = tmp_path / "engine.yaml"
    file.write_text(EXAMPLE)
    return file


def logged(stderr: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stderr.splitlines()]


def test_every_value_is_printed_with_its_path_and_layer_and_every_replacement_is_logged(file: Path) -> None:
    given = ["--extra-engine-args", str(file), "--publish-kv-events", "--trtllm.max_batch_size", "8"]
    shown = run(*given, "--trtllm.iter_stats_max_iterations", "-1", "--tensor-parallel-size", "2")
    assert shown.code == 0, shown.err
    rows = [line.split(maxsplit=2) for line in shown.out.splitlines() if not line.startswith("warning: ")]
    assert [name for name, _, _ in rows] == sorted(name for name, _, _ in rows)
    table = {name: (value, layer) for name, value, layer in rows}
    assert table["skip_tokenizer_init"] == ("true", "default")
    assert [shown_line.split() for shown_line in shown.out.splitlines() if "tokens_per_block" in shown_line] == [
        ["kv_cache_config.tokens_per_block", "engine", "default", "not", "sent"]
    ]
    assert table["tensor_parallel_size"] == ("2", "flag (--tensor-parallel-size)")
    assert table["kv_cache_config.dtype"] == ('"fp8"', f"file ({file}:3)")
    assert table["max_batch_size"] == ("8", "override (--trtllm.max_batch_size)")
    assert table["iter_stats_max_iterations"][0] == "-1"
    assert table["kv_cache_config.event_buffer_max_size"] == ("100000", "forced (KV events are published)")
    warnings = [line for line in shown.out.splitlines() if line.startswith("warning: ")]
    assert [line.split(": ")[2] for line in warnings] == [
        "num_postprocess_workers",
        "kv_cache_config.enable_block_reuse",
    ]
    replaced = [line for line in logged(shown.err) if line["event"] == "engine_argument_replaced"]
    assert [(line["argument"], line["old"], line["new"], line["old_layer"]) for line in replaced] == [
        ("max_batch_size", 64, 8, f"file ({file}:5)")
    ]
    assert "hunter2" not in shown.out + shown.err


def test_no_engine_is_needed() -> None:
    module = "worker_agent.commands.print_engine_args"
    code = f"import sys, {module}; sys.exit('tensorrt_llm' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(("flag", "value"), [("--free-gpu-memory-fraction", "1.5"), ("--load-format", "zzz")])
def test_a_value_that_the_engine_has_not_is_refused_with_its_flag(flag: str, value: str) -> None:
    ended = run(flag, value)
    assert (ended.code, f"Invalid value for '{flag}'" in ended.err) == (2, True), ended.err
