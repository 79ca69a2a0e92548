"""`configs/launch/trtllm-*.sh` and the Slurm job of them: real processes, with the fake of TensorRT-LLM and of srun."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from bench.processes import free_ports
from tests.support.paths import ROOT
from tests.support.processes import BLOCK_SIZE, with_fake
from tests.system.e2e.test_signals import Started, alive, started
from tests.system.e2e.test_sweep import SMALL

pytestmark = pytest.mark.slow

LAUNCH = ROOT / "configs" / "launch"
SERVED = ("--served-name", "sim-8b", "--kv-block-size", f"{BLOCK_SIZE}", "--max-seq-len", "4096")
SHAPES = {
    "agg": ("--workers", "2", "--gpus", "2"),
    "disagg": ("--prefill-gpus", "1", "--decode-gpus", "3"),
}
PLACED = {
    "agg": {"aggregated-1": "0,1", "aggregated-2": "2,3"},
    "disagg": {"prefill-1": "0", "decode-1": "1,2,3"},
}


def path(*first: Path) -> str:
    """Return a PATH with the checkout's commands and nats-server."""
    return os.pathsep.join([*map(str, first), str(Path(sys.executable).parent), os.environ["PATH"]])


@contextmanager
def launched(kind: str, port: int, *arguments: str) -> Iterator[Started]:
    control, nats = map(str, free_ports(2))
    common = ("--model", "none", "--text", "byte", "--port", str(port), "--control-port", control, "--nats-port", nats)
    script = ("bash", str(LAUNCH / f"trtllm-{kind}.sh"))
    few_blocks = with_fake(model={"gpu_blocks": 40})  # a cache that leaked a few requests' blocks would be full
    with started(*common, *arguments, "--", *SERVED, command=script, PATH=path(), **few_blocks) as fleet:
        yield fleet


def until_served(fleet: Started, *names: str) -> None:
    for name in names:
        if f"worker {name} on" not in fleet.output:
            fleet.line_with(f"worker {name} on")


def shape_of(kind: str, directory: Path) -> tuple[str, ...]:
    file = directory / "engine.yaml"
    pairs = {"cache_transceiver_config": {"backend": "UCX"}, "kv_cache_config": {"dtype": "fp8"}}
    file.write_text(json.dumps(pairs if kind == "disagg" else {}))
    names = ("prefill-args", "decode-args") if kind == "disagg" else ("engine-args",)
    return (*SHAPES[kind], *(word for name in names for word in (f"--{name}", str(file))))


def gpus_of(fleet: Started) -> dict[str, str]:
    found = {}
    for each in fleet.children():
        words = each.cmdline()
        if "--worker-id" in words:
            found[words[words.index("--worker-id") + 1]] = each.environ()["CUDA_VISIBLE_DEVICES"]
    return found


def swept(fleet: Started, url: str, kind: str, out: Path) -> None:
    gpus = str(sum(len(each.split(",")) for each in gpus_of(fleet).values()))
    endpoint = ("--url", url, "--fleet", kind, "--gpus", gpus, "--timeout", "20")
    with started("router", "bench", "sweep", "--out", str(out), *endpoint, "--concurrency", "1,2", *SMALL) as sweep:
        assert sweep.ended() == 0, sweep.output


@pytest.mark.timeout(400)
def test_both_fleets_start_each_worker_on_its_gpus_share_a_plot_and_end_in_order(tmp_path: Path) -> None:
    for kind, placed in PLACED.items():
        (port,) = free_ports(1)
        with launched(kind, port, *shape_of(kind, tmp_path)) as fleet:
            until_served(fleet, *placed)
            assert gpus_of(fleet) == placed
            swept(fleet, f"http://127.0.0.1:{port}", kind, tmp_path / "runs")
            children = fleet.children()
            fleet.signal(signal.SIGINT)
            assert fleet.ended() == 0, fleet.output
            assert not alive(children)
            assert "Traceback" not in fleet.output
            drains_router = ["connections" in line for line in fleet.output.splitlines() if "drain_" in line]
            assert drains_router == [False] * 2 * len(placed) + [True] * 2, fleet.output
    with started("router", "bench", "report", str(tmp_path / "runs")) as reported:
        assert reported.ended() == 0, reported.output
    runs = json.loads((tmp_path / "runs" / "report" / "summary.json").read_bytes())["runs"]
    measured = [(each["fleet"], each["load"], each["workers"], each["figures"]["failed"]) for each in runs]
    assert measured == [(kind, load, 4, 0) for kind in PLACED for load in ("c1", "c2")]
    (plot,) = (tmp_path / "runs" / "report").glob("pareto-*.svg")
    assert all(kind in plot.read_text() for kind in PLACED)


@pytest.mark.timeout(120)
def test_a_worker_that_dies_ends_the_fleet_with_1() -> None:
    (port,) = free_ports(1)
    with launched("agg", port) as fleet:
        until_served(fleet, "aggregated-1")
        children = fleet.children()
        next(each for each in children if "--worker-id" in each.cmdline()).send_signal(signal.SIGKILL)
        assert fleet.ended() == 1, fleet.output
        assert "a process ended; all end" in fleet.output
        assert not alive(children)


@pytest.mark.timeout(60)
def test_a_batch_job_starts_nats_router_and_engines_and_ends_them_after_the_sweep(tmp_path: Path) -> None:
    """Its sweep is a stub that ends once the others have been called; they run until they are told to end."""
    programs, calls = tmp_path / "bin", tmp_path / "calls"
    programs.mkdir()
    calls.mkdir()
    ends = f"until [ $(ls {calls} | wc -l) = 4 ]; do sleep 0.1; done; exit 0"
    for name in ("nats-server", "router", "srun"):
        sweeps = f'if [ "$1" = bench ]; then echo sweep "$@"; {ends}; fi\n' if name == "router" else ""
        called = f'touch {calls}/{name}-$$; echo {name} "$@"; exec sleep 600'
        (programs / name).write_text(f"#!/bin/sh\n{sweeps}{called}\n")
        (programs / name).chmod(0o755)
    shape = ("--prefill-args", "/p.yaml", "--decode-gpus", "16", "--decode-args", "/d.yaml")
    job = ("bash", str(ROOT / "configs" / "slurm" / "trtllm-sweep.sbatch"))
    told = {"OUT": str(tmp_path / "runs"), "FLEET": "r1", "MODEL": "/m", "NAME": "r", "SWEEP": "--isl 64 --osl 4"}
    slurm = {"SLURM_NTASKS": "2", "SLURM_SUBMIT_DIR": str(ROOT)}
    with started("--host", "n1", *shape, command=job, PATH=path(programs), **slurm, **told) as ran:
        assert ran.ended() == 0, ran.output
    assert not any(psutil.pid_exists(int(each.name.rpartition("-")[2])) for each in calls.iterdir())
    lines = [line.split() for line in ran.output.splitlines()]
    assert sorted(line[0] for line in lines if line[0] in ("nats-server", "router", "srun", "sweep")) == sorted(
        ["nats-server", "router", "srun", "srun", "sweep"]
    )
    (sweep,) = [" ".join(line) for line in lines if line[0] == "sweep"]
    assert "--fleet r1 --gpus 2 --model r --wait 3600 --isl 64 --osl 4" in sweep
    steps = sorted(" ".join(line) for line in lines if line[0] == "srun")
    assert ["--nodes=2 --ntasks-per-node=8 --gpus-per-node=8" in each for each in steps] == [False, True]
    for step, role, file in zip(reversed(steps), ("decode", "prefill"), ("/d.yaml", "/p.yaml"), strict=True):
        assert f"--role {role} --worker-id {role}-1 --model /m --nats-url nats://n1:4222" in step
        assert f"--extra-engine-args {file} --served-name r" in step


@pytest.mark.parametrize("script", sorted(LAUNCH.glob("trtllm-*.sh")), ids=lambda script: script.name)
def test_help_lists_the_options_and_a_missing_model_is_refused(script: Path) -> None:
    with started("--help", command=("bash", str(script))) as helped:
        assert helped.ended() == 0
    for option in ("--model DIR", "--tracing URL", "--modality multimodal"):
        assert option in helped.output
    with started(command=("bash", str(script))) as empty:
        assert empty.ended() == 2
    assert "found no --model" in empty.output


def test_an_option_that_no_script_has_is_refused() -> None:
    with started("--wrokers", "2", command=("bash", str(LAUNCH / "trtllm-agg.sh"))) as refused:
        assert refused.ended() == 2
    assert "found --wrokers, allowed what --help lists" in refused.output


def test_tracing_and_modality_reach_router_and_workers(tmp_path: Path) -> None:
    for name in ("router", "worker-agent"):
        (tmp_path / name).write_text('#!/bin/sh\necho "$(basename "$0") $*"\nexec sleep 60\n')
        (tmp_path / name).chmod(0o755)
    words = ("--model", "/m", "--tracing", "http://c:4318", "--", "--modality", "multimodal")
    with started(*words, command=("bash", str(LAUNCH / "trtllm-agg.sh")), PATH=path(tmp_path)) as fleet:
        told = {fleet.line_with("").split()[0] for _ in range(2)}
        os.kill(fleet.process.pid, signal.SIGTERM)
        assert fleet.ended() == 0
    assert told == {"router", "worker-agent"}
    lines = {line.split()[0]: line for line in fleet.output.splitlines()}
    assert "--text /m" in lines["router"]
    assert "tracing.endpoint=http://c:4318 --set tracing.ratio=1" in lines["router"]
    assert "--modality multimodal --set tracing.endpoint=http://c:4318" in lines["worker-agent"]
