"""`worker-agent config convert` and `config slurm` as typed: what they print, write and end with."""

from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from kv_runtime.config.loading import load_settings
from tests.support.paths import ROOT
from worker_agent.__main__ import main
from worker_agent.config import AgentSettings

DECODE = str(ROOT / "configs" / "engines" / "gpt-oss-120b" / "decode.yaml")
SLURM = ["slurm", "--tasks-per-node", "8(x4)", "--prefill", "2", "8", "--decode", "1", "16", "--decode-attention-dp",
         "--gpu", "b200", "--precision", "nvfp4", "--mtp-layers", "1", "--slots", "288", "--model", "/models/r1",
         "--nats-url", "nats://head:4222"]  # fmt: skip


class Done(NamedTuple):
    exit_code: object
    stdout: str
    stderr: str


def config(*arguments: str) -> Done:
    """Run the command; the oldest click's own runner cannot tell stdout from stderr."""
    stdout, stderr = StringIO(), StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr), pytest.raises(SystemExit) as ended:
        main(["config", *arguments])
    return Done(ended.value.code, stdout.getvalue(), stderr.getvalue())


def test_check_prints_a_diff_and_writes_nothing(tmp_path: Path) -> None:
    output = tmp_path / "agg.yaml"
    done = config("convert", DECODE, "--to", "aggregated", "--output", str(output), "--check")
    assert done.exit_code == 0, done.stderr
    assert "-cache_transceiver_config:" in done.stdout
    assert "+enable_chunked_prefill: true" in done.stdout
    assert not output.exists()


def test_another_size_is_printed() -> None:
    done = config("convert", DECODE, "--to", "decode", "--tensor-parallel-size", "8")
    assert (yaml.safe_load(done.stdout)["tensor_parallel_size"], done.stderr) == (8, "")
    assert yaml.safe_load(done.stdout)["moe_expert_parallel_size"] == 8


def test_an_invalid_file_or_result_ends_with_2(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("max_batch_sise: 3\n")
    done = config("convert", str(file), "--to", "aggregated")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "is it max_batch_size?" in done.stderr
    assert config("convert", str(tmp_path / "none.yaml"), "--to", "aggregated").exit_code == 2


@pytest.mark.parametrize(
    ("text", "flags", "said"),
    [
        ("kv_cache_config: 3", (), ":1: kv_cache_config: expected"),
        ("tensor_parallel_size: eight", (), ":1: tensor_parallel_size: expected an integer of 1 or more, found"),
        ("max_seq_len: 9\nmoe_expert_parallel_size: x", (), ":2: moe_expert_parallel_size: expected"),
        ("moe_expert_parallel_size: 0", (), ":1: moe_expert_parallel_size: expected"),
        (
            "tensor_parallel_size: 8\nmoe_expert_parallel_size: 4",
            ("--tensor-parallel-size", "6"),
            ": moe_expert_parallel_size: found 4, allowed a divisor of tensor_parallel_size, 6",
        ),
        (
            "max_seq_len: 9000\ncache_transceiver_config: {backend: UCX, max_tokens_in_buffer: 64}",
            (),
            ", converted: cache_transceiver_config.max_tokens_in_buffer: expected 8999 or more",
        ),
    ],
)
def test_a_bad_value_is_said_with_file_place_found_and_allowed(
    tmp_path: Path, text: str, flags: tuple[str, ...], said: str
) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(f"{text}\n")
    done = config("convert", str(file), "--to", "prefill", "--tensor-parallel-size", "2", *flags)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{file}{said}" in done.stderr


def test_a_result_that_cannot_be_written_ends_with_2(tmp_path: Path) -> None:
    done = config("convert", DECODE, "--to", "aggregated", "--output", str(tmp_path / "none" / "agg.yaml"))
    assert done.exit_code == 2
    assert f"--output: found {tmp_path / 'none' / 'agg.yaml'} (No such file or directory), allowed" in done.stderr


@pytest.mark.parametrize("name", ["gpt-oss-120b/decode", "gpt-oss-120b/prefill"])
def test_a_file_goes_to_aggregated_of_twice_the_size_and_back(tmp_path: Path, name: str) -> None:
    source = ROOT / "configs" / "engines" / f"{name}.yaml"
    first = yaml.safe_load(source.read_text())
    role, size = name.rpartition("/")[2], first["tensor_parallel_size"]
    there, back = tmp_path / "agg.yaml", tmp_path / "back.yaml"
    for file, to, gpus, output in ((source, "aggregated", 2 * size, there), (there, role, size, back)):
        flags = ("--to", to, "--tensor-parallel-size", str(gpus))
        assert config("convert", str(file), *flags, "--output", str(output)).exit_code == 0
        again = config("convert", str(output), *flags, "--check")
        assert (again.exit_code, again.stdout) == (0, ""), "a converted file would be changed again"
    last = yaml.safe_load(back.read_text())
    assert {**last, "enable_chunked_prefill": True, "disable_overlap_scheduler": False} == {
        **first, "enable_chunked_prefill": True, "disable_overlap_scheduler": False,
    }  # fmt: skip


def test_an_allocation_gets_two_files_and_a_script(tmp_path: Path) -> None:
    done = config(*SLURM, "--nodes", "node[01-03,07]", "--output", str(tmp_path))
    assert done.exit_code == 0, done.stderr
    decode = yaml.safe_load((tmp_path / "decode.yaml").read_text())
    assert (decode["moe_config"]["backend"], decode["gpus_per_node"]) == ("CUTEDSL", 8)
    starts = [line for line in (tmp_path / "start.sh").read_text().splitlines() if line.startswith("srun")]
    assert ["--nodelist=node01 " in starts[0], "--nodelist=node02 " in starts[1]] == [True, True]
    assert "--nodes=2 --nodelist=node03,node07 " in starts[2]
    assert len(starts) == 3
    again = config(*SLURM, "--nodes", "node[01-03,07]", "--output", str(tmp_path), "--check")
    assert (again.exit_code, again.stdout) == (0, "")


def test_the_script_s_flags_and_settings_are_those_of_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config(*SLURM, "--nodes", "n[1-4]", "--output", str(tmp_path)).exit_code == 0
    command = main.commands["serve"].imported()  # type: ignore[attr-defined]
    known = {flag for parameter in command.params for flag in parameter.opts}
    words = (tmp_path / "start.sh").read_text().split("worker-agent serve")[1].split("&")[0].split()
    assert {word for word in words if word.startswith("--")} <= known
    given = [word for before, word in pairwise(words) if before == "--set"]
    monkeypatch.setenv("KVROUTER_WORKER__TOKEN", "secret")
    settings = load_settings(AgentSettings, assignments=given)
    assert settings.worker.advertised_host == "n1"


def test_too_few_nodes_write_nothing(tmp_path: Path) -> None:
    output = tmp_path / "run"
    done = config(*SLURM, "--nodes", "n[1-3]", "--output", str(output))
    assert (done.exit_code, output.exists()) == (2, False)
    assert "3 nodes, but tasks of 4" in done.stderr
    assert config(*SLURM, "--nodes", "n[1-", "--output", str(output)).exit_code == 2
