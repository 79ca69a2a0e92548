"""`worker-agent config`: engine files made from others, or for a Slurm allocation."""

import shlex
import sys
from difflib import unified_diff
from pathlib import Path
from typing import Any, NoReturn

import click
import yaml

from kv_protocol.errors import LimitExceeded
from worker_agent.commands.print_engine_args import INVALID
from worker_agent.engine_args.arguments import effective_args
from worker_agent.engine_args.convert import NotConvertible, Target, converted, resized
from worker_agent.engine_args.findings import EngineArgsInvalid
from worker_agent.engine_args.layers import Layer
from worker_agent.engine_args.rules import Circumstances
from worker_agent.engine_args.slurm import (
    Gpu,
    PlacedWorker,
    Precision,
    Shape,
    ShapeRefused,
    engine_arguments,
    moe_backend,
    placed,
    tasks_per_node,
)
from worker_agent.engine_args.text import read_file
from worker_agent.engines.trtllm.slurm_nodes import expanded

_COUNT = click.IntRange(1)
_CHECK = click.option("--check", is_flag=True, help="write nothing; print what would change, and the warnings")


@click.group("config")
def config() -> None:
    """Make files of TensorRT-LLM arguments: from other files, or for a Slurm allocation."""


@config.command("convert")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "target",
    type=click.Choice(["aggregated", "prefill", "decode"]),
    required=True,
    help="the role of the worker that the result is for",
)
@click.option("--tensor-parallel-size", type=_COUNT, help="GPUs of the worker; absent: as they are")
@click.option("--transceiver", default="UCX", show_default=True, help="of a prefill or decode worker that has none")
@click.option("--output", type=click.Path(path_type=Path), help="absent: standard output")
@_CHECK
def convert(
    *,
    file: Path,
    target: Target,
    tensor_parallel_size: int | None,
    transceiver: str,
    output: Path | None,
    check: bool,
) -> None:
    """Convert a file of engine arguments to another role or size. Comments are not kept.

    Block reuse is on in the result. The exit code is 2, and nothing is written, if file or result are invalid.

    \b
    Example:  worker-agent config convert decode.yaml --to aggregated --tensor-parallel-size 8 --check
    """  # noqa: D301  (click reads the character, not its name)
    try:
        layer = read_file(file, "file")
        effective_args([layer], Circumstances())
        source = dict(layer.values)
        result = converted(source, target, transceiver)
        if tensor_parallel_size is not None:
            result = resized(result, tensor_parallel_size)
        warnings = _warnings(result, target, f"{file}, converted")
    except EngineArgsInvalid as error:
        _end(error)
    except NotConvertible as error:
        _end(f"{file}: {error}")
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    if check:
        click.echo(_difference(_dumped(source), _dumped(result), str(file), target), nl=False)
    elif output is None:
        click.echo(_dumped(result), nl=False)
    else:
        try:
            output.write_text(_dumped(result), encoding="utf-8")
        except OSError as error:
            _end(f"--output: found {output} ({error.strerror}), allowed a file that can be written")


@config.command("slurm")
@click.option("--nodes", envvar="SLURM_JOB_NODELIST", required=True, help="as Slurm writes them: node[01-03,07]")
@click.option("--tasks-per-node", envvar="SLURM_TASKS_PER_NODE", required=True, help="one task is one GPU: 4(x2)")
@click.option("--prefill", type=(_COUNT, _COUNT), required=True, metavar="WORKERS GPUS", help="GPUs of each worker")
@click.option("--decode", type=(_COUNT, _COUNT), required=True, metavar="WORKERS GPUS", help="GPUs of each worker")
@click.option("--prefill-attention-dp", is_flag=True, help="each GPU of a prefill worker has a KV cache of its own")
@click.option("--decode-attention-dp", is_flag=True, help="each GPU of a decode worker has a KV cache of its own")
@click.option("--max-seq-len", type=click.IntRange(2), default=16384, show_default=True, help="prompt and answer")
@click.option("--prefill-batch", type=_COUNT, default=16, show_default=True, help="requests together")
@click.option("--decode-batch", type=_COUNT, default=256, show_default=True, help="requests together")
@click.option("--gpu", type=click.Choice(["b200", "h200"]), required=True, help="decides the experts' backend")
@click.option("--precision", type=click.Choice(["nvfp4", "fp8"]), required=True, help="of the weights")
@click.option("--mtp-layers", type=click.IntRange(0), default=0, show_default=True, help="0: no speculation")
@click.option("--slots", type=click.IntRange(0), default=0, show_default=True, help="expert load balancer; 0: none")
@click.option("--model", required=True, help="the model's directory, on every node")
@click.option("--nats-url", required=True, help="the event log, reachable from every node")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), required=True, help="a directory")
@_CHECK
@click.argument("arguments", nargs=-1, metavar="[-- FLAGS]")
def slurm(*, output: Path, check: bool, **options: Any) -> None:  # noqa: ANN401 - click has checked them
    """Write prefill.yaml, decode.yaml and start.sh for an allocation of Slurm.

    FLAGS are flags of `worker-agent serve`, for every worker.

    start.sh starts each worker with srun on its nodes, and ends when one of them ends. Run it within the allocation
    (`sbatch`, `salloc`). Experts' backend and placement are chosen as `worker_agent/engine_args/slurm.py` says.

    \b
    Example:  worker-agent config slurm --nodes 'node[01-04]' --tasks-per-node '8(x4)' --prefill 2 8 --decode 1 16
              --decode-attention-dp --gpu b200 --precision nvfp4 --model /models/r1 --nats-url nats://head:4222
              --output run --check
    """  # noqa: D301
    try:
        files = _slurm_files(output, **options)
    except (EngineArgsInvalid, LimitExceeded, ShapeRefused) as error:
        _end(error)
    for name, text in files.items():
        file = output / name
        if check:
            before = file.read_text(encoding="utf-8") if file.is_file() else ""
            click.echo(_difference(before, text, str(file), "made"), nl=False)
        else:
            output.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")


def _slurm_files(output: Path, **options: Any) -> dict[str, str]:  # noqa: ANN401
    gpu: Gpu = options["gpu"]
    precision: Precision = options["precision"]
    shapes = [_shape("prefill", options), _shape("decode", options)]
    workers = placed(expanded(options["nodes"]), tasks_per_node(options["tasks_per_node"]), shapes)
    files: dict[str, str] = {}
    for shape in shapes:
        per_node = next(worker.gpus_per_node for worker in workers if worker.role == shape.role)
        arguments = engine_arguments(shape, moe_backend(gpu, precision, shape), per_node)
        for warning in _warnings(arguments, shape.role, f"{shape.role}.yaml"):
            click.echo(f"warning: {warning}", err=True)
        files[f"{shape.role}.yaml"] = _dumped(arguments)
    files["start.sh"] = _script(workers, output, options)
    return files


def _shape(role: Any, options: dict[str, Any]) -> Shape:  # noqa: ANN401 - one of two words
    workers, gpus = options[role]
    batch = options[f"{role}_batch"]
    tokens = options["max_seq_len"] if role == "prefill" else batch * (1 + options["mtp_layers"])
    return Shape(
        role=role,
        workers=workers,
        gpus=gpus,
        max_batch_size=batch,
        max_num_tokens=tokens,
        max_seq_len=options["max_seq_len"],
        attention_dp=options[f"{role}_attention_dp"],
        mtp_layers=options["mtp_layers"],
        slots=options["slots"],
    )


def _script(workers: list[PlacedWorker], output: Path, options: dict[str, Any]) -> str:
    """Return the script. `trtllm-llmapi-launch` starts the engine's processes of all tasks behind the first one.

    Source: NVIDIA/TensorRT-LLM, `examples/llm-api/llm_mgmn_trtllm_serve.sh`.
    """
    demand = ': "${KVROUTER_WORKER__TOKEN:?the bearer token of all workers, which the router has too}"'
    lines = ["#!/bin/bash", "set -eu", demand, "trap 'trap : TERM; kill 0; wait' EXIT"]
    for worker in workers:
        nodes = ",".join(worker.nodes)
        srun = ["srun", "--overlap", "--mpi=pmix", f"--nodes={len(worker.nodes)}", f"--nodelist={nodes}",
                f"--ntasks-per-node={worker.gpus_per_node}", f"--gpus-per-node={worker.gpus_per_node}"]  # fmt: skip
        agent = ["trtllm-llmapi-launch", "worker-agent", "serve", "--engine", "trtllm", "--role", worker.role,
                 "--worker-id", f"{worker.role}-{worker.number}", "--model", options["model"],
                 "--nats-url", options["nats_url"],
                 "--port", "0", "--publish-kv-events", "--publish-metrics", "--set", "worker.host=0.0.0.0",
                 "--set", f"worker.advertise_host={worker.nodes[0]}",
                 "--extra-engine-args", str(output / f"{worker.role}.yaml"), *options["arguments"]]  # fmt: skip
        lines.append(f"{shlex.join([*srun, *agent])} &")
    return "\n".join([*lines, "wait -n", ""])


def _warnings(arguments: dict[str, Any], role: Target, place: str) -> list[str]:
    """Return the warnings; raise `EngineArgsInvalid` for what no worker of the role would take."""
    layer = Layer(name="file", values=arguments, place=place)
    around = Circumstances(role=role, publishes_kv_events=True)
    return [str(warning) for warning in effective_args([layer], around).warnings]


def _dumped(arguments: dict[str, Any]) -> str:
    return yaml.safe_dump(arguments, sort_keys=True) if arguments else ""


def _difference(before: str, after: str, old: str, new: str) -> str:
    lines = unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), old, new)
    return "".join(lines)


def _end(error: Exception | str) -> NoReturn:
    click.echo(f"worker-agent: {error}", err=True)
    sys.exit(INVALID)
