"""Chooses and builds the engine of `serve`: the simulated one, or TensorRT-LLM in this process.

what                simulated                  trtllm
configured by       section `engine`           engine arguments (`engine_args/`), sections `engine` and `trtllm`
model in requests   served_names, else model   served_names, else model, else the argument `model`
text                engine.text, else `byte`   engine.text, else the model's directory
KV events           polled                     polled with --publish-kv-events, not on an encode worker
statistics          polled                     with --publish-metrics, not on an encode worker
images              on an encode worker only   on an encode worker or with --modality multimodal if the model takes them
"""

import asyncio
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from kv_runtime.clock import Clock
from kv_runtime.config.loading import ConfigurationError
from kv_runtime.main_thread import ThreadCall
from kv_runtime.text.byte_model import BYTE_MODEL
from kv_runtime.text.loading import UnreadText, load_text
from kv_runtime.text.model import Text
from worker_agent.config import SIMULATED, AgentSettings
from worker_agent.engine_args.arguments import EngineArgs, EngineOptions
from worker_agent.engine_args.layers import ArgumentFinding, EngineArgsInvalid
from worker_agent.engine_args.sources import check_files, load_engine_args
from worker_agent.engines.simulated.engine import SimulatedEngine
from worker_agent.engines.simulated.scheduler import EVENT_BUFFER_MAX_SIZE, Simulator
from worker_agent.engines.simulated.tokens import ScriptedSource, TokenSource
from worker_agent.engines.trtllm.engine import TensorRTLLMEngine
from worker_agent.port.types import EngineDescription

_log = structlog.get_logger("serve")


class EngineChoice(NamedTuple):
    """The chosen engine's parameters; `args` are TensorRT-LLM's, None for the simulated engine."""

    args: EngineArgs | None
    names: tuple[str, ...]
    """The model's names in requests; the first is its name in the fleet."""
    text: str
    """`byte`, or the directory of tokenizer and template."""
    polls_events: bool
    has_statistics: bool
    event_buffer: int
    """How many events a rank keeps until they are polled."""
    takes_media: bool = False
    """Whether prompts may have images, if the model takes them."""
    block_reuse: bool | None = True
    """This field and the next two go into the fields of the same names of `WorkerRegistered`."""
    transfer_buffer_tokens: int = 0
    transfer_backend: str = ""


def chosen_engine(settings: AgentSettings, options: EngineOptions) -> EngineChoice:
    """Return the engine that the settings and the engine arguments choose.

    Raises:
        EngineArgsInvalid: arguments are invalid, or are given to the simulated engine, which has none.
        ConfigurationError: the settings contradict the arguments.
    """
    if settings.engine.kind == "trtllm":
        return _trtllm_chosen(settings, options)
    if options.given:
        expected = "options of this command; TensorRT-LLM's arguments go with --engine trtllm alone"
        raise EngineArgsInvalid([ArgumentFinding(each, "another", expected) for each in options.given])
    engine = settings.engine
    return EngineChoice(
        None,
        engine.served_names or (engine.model or SIMULATED,),
        engine.text or BYTE_MODEL,
        polls_events=True,
        has_statistics=True,
        event_buffer=EVENT_BUFFER_MAX_SIZE,
        takes_media=settings.worker.role == "encode",
    )


def _trtllm_chosen(settings: AgentSettings, options: EngineOptions) -> EngineChoice:
    role, model, processors = settings.worker.role, settings.engine.model, bool(settings.trtllm.logits_processors)
    flags = {**options.flags, "model": model or None}
    args = load_engine_args(msgspec.structs.replace(options, flags=flags, role=role, has_logits_processors=processors))
    check_files(args)
    _check_together(settings, args)
    model = model or str(args.value("model"))
    return EngineChoice(
        args,
        settings.engine.served_names or (model,),
        settings.engine.text or model,
        polls_events=options.publishes_kv_events and role != "encode",
        has_statistics=args.value("enable_iter_perf_stats") is True and role != "encode",
        event_buffer=args.value("kv_cache_config", "event_buffer_max_size") or 0,
        takes_media=options.is_multimodal or role == "encode",
        block_reuse=args.value("kv_cache_config", "enable_block_reuse"),
        transfer_buffer_tokens=args.value("cache_transceiver_config", "max_tokens_in_buffer") or 0,
        transfer_backend=_named_backend(args),
    )


def _named_backend(args: EngineArgs) -> str:
    """Return the transfer backend that the arguments name; empty for `DEFAULT`: the environment decides.

    Source: NVIDIA/TensorRT-LLM, `tensorrt_llm/llmapi/llm_args.py`, `CacheTransceiverConfig._resolve_default_backend`.
    """
    backend = args.value("cache_transceiver_config", "backend")
    return "" if backend in (None, "DEFAULT") else str(backend)


def engine_text(settings: AgentSettings, chosen: EngineChoice) -> Text:
    """Return the model's tokenizer and chat template; raise `TextError`."""
    text = load_text(chosen.text, chat_template=settings.engine.chat_template)
    if isinstance(text, UnreadText):
        text.refuse()
    return text


def build_engine(
    settings: AgentSettings, chosen: EngineChoice, text: Text, clock: Clock, call: ThreadCall = asyncio.to_thread
) -> SimulatedEngine | TensorRTLLMEngine:
    """Return the engine, not started; `call` will load and end it. Raise `EngineError` if it cannot be built."""
    if chosen.args is None:
        return _simulated(settings, chosen.names[0], text, clock)
    own = settings.trtllm.settings(text, settings.telemetry.log_level)
    return TensorRTLLMEngine(chosen.args, clock, model=chosen.names[0], settings=own, call=call)


def _simulated(settings: AgentSettings, name: str, text: Text, clock: Clock) -> SimulatedEngine:
    engine = settings.engine
    description = EngineDescription(
        model=name,
        version=version("kv-router"),
        event_source="simulated",
        block_size=engine.block_size,
        total_kv_blocks=engine.total_kv_blocks,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_seq_len=engine.max_seq_len,
        dp_ranks=tuple(range(engine.dp_ranks)),
        kv_cache_dtype=SIMULATED,
    )
    source = TokenSource()
    if engine.answer:
        source = ScriptedSource(
            script=(*text.encode(engine.answer, add_special_tokens=False), *sorted(text.eos_ids)[:1])
        )
    simulator = Simulator(
        description,
        token_source=source,
        host_blocks=engine.host_blocks,
        role=settings.worker.role,
    )
    return SimulatedEngine(simulator, clock, speed=engine.speed)


def _check_together(settings: AgentSettings, args: EngineArgs) -> None:
    trtllm = settings.trtllm
    problems = [
        f"trtllm.loras.{name}: found {path!r}, allowed a directory that is there"
        for name, path in trtllm.loras.items()
        if not Path(path).is_dir()
    ]
    if trtllm.loras and not args.value("enable_lora") and not args.value("lora_config"):
        names = ", ".join(trtllm.loras)
        problems.append(f"trtllm.loras: found {names}, allowed with the engine argument enable_lora true")
    if problems:
        raise ConfigurationError(problems)
