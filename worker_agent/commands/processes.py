"""The commands `worker-agent serve` (`serve.py` composes its process) and `worker-agent attach`.

`attach` brings an engine that runs in another process into the fleet, while this process runs: it is one
`AttachedWorker` with a connection to the log and a status page of its own.
"""

import asyncio
import os
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial

import click
import zmq.asyncio

from kv_protocol.fleet_gate import FleetGate
from kv_runtime.clock import Clock
from kv_runtime.config.command import errors_printed, takes_settings
from kv_runtime.config.loading import ConfigurationError
from kv_runtime.event_log import BrokerUnavailable, StoppedUnconnected, connected_log
from kv_runtime.http.acceptor import PortUsed
from kv_runtime.http.hosts import url_of
from kv_runtime.main_thread import ThreadCall, run_beside
from kv_runtime.process import run_process
from kv_runtime.supervise import Part, PartGaveUp, run_parts
from kv_runtime.text.chat_messages import TextError
from kv_runtime.text.loading import load_text
from kv_runtime.tracing.service import opened_tracing
from worker_agent.api.app import status_server
from worker_agent.api.in_flight import SERVICE
from worker_agent.api.parsers.families import REASONING_PARSERS, TOOL_CALL_PARSERS
from worker_agent.attached.config import AttachSettings
from worker_agent.attached.worker import AttachedWorker, Host, check
from worker_agent.commands.engine_choice import chosen_engine
from worker_agent.commands.print_engine_args import DYNAMIC_FLAGS, INVALID, engine_args_options
from worker_agent.commands.serve import ServedWorker
from worker_agent.config import AgentSettings
from worker_agent.engine_args.arguments import EngineOptions
from worker_agent.engine_args.layers import EngineArgsInvalid
from worker_agent.engines.servers import SERVERS
from worker_agent.port.types import EngineError

_EXPECTED = (ConfigurationError, BrokerUnavailable, PortUsed, TextError, EngineError, PartGaveUp)

_MARGIN_S = 2.0  # time that a stop may take beyond the worker's own


@click.command(context_settings=DYNAMIC_FLAGS)
@takes_settings(AgentSettings, "worker-agent", _EXPECTED)
@click.option("--engine", "engine__kind", help="which engine: simulated, trtllm")
@click.option("--model", "engine__model", help="the model's name; of trtllm its directory, or its name on the hub")
@click.option("--served-name", "engine__served_names", multiple=True, help="a name that requests may use, any number")
@click.option("--chat-template", "engine__chat_template", help="a Jinja file in place of the model's own template")
@click.option("--tool-call-parser", "engine__tool_call_parser", help=f"{', '.join(TOOL_CALL_PARSERS)}; absent: none")
@click.option("--reasoning-parser", "engine__reasoning_parser", help=f"{', '.join(REASONING_PARSERS)}; absent: none")
@click.option("--role", "worker__role", help="phases that it serves: aggregated, prefill, decode, encode")
@click.option("--endpoint", "worker__endpoint", help="its name: namespace.component.endpoint; absent: by its role")
@click.option("--worker-id", "worker__id", help="unique name in the fleet")
@click.option("--nats-url", "nats__url", help="the event log: nats://host:port")
@click.option("--port", "worker__port", type=int, help="HTTP port; 0: any free one")
@engine_args_options
def serve(*, settings: AgentSettings, options: EngineOptions, **_: object) -> None:
    """Serve one engine until a signal comes. What follows --port is TensorRT-LLM's, as `print-engine-args` has it."""

    async def served(stop: asyncio.Event, call: ThreadCall) -> None:
        chosen = chosen_engine(settings, options)
        await ServedWorker(settings, chosen, call).run(stop, partial(print, flush=True))

    with suppress(StoppedUnconnected), errors_printed("worker-agent", (EngineArgsInvalid,), INVALID):
        if settings.engine.kind == "trtllm":
            run_beside(served)  # TensorRT-LLM is built on the main thread; the event loop then runs on another thread
        else:
            run_process(lambda stop: served(stop, asyncio.to_thread))


@click.command()
@takes_settings(AttachSettings, "worker-agent", _EXPECTED)
@click.option("--engine", "engine__kind", help=f"which engine: {', '.join(SERVERS)}")
@click.option("--url", "engine__base_url", help="its OpenAI endpoint, http://host:port; absent: events only")
@click.option("--kv-events", "engine__publish_endpoint", help="tcp://host:port of rank 0, or `poll`")
@click.option("--replay-endpoint", "engine__replay_endpoint", help="tcp://host:port of rank 0's replays; absent: none")
@click.option("--requests", "engine__requests", help="auto, direct (to the engine itself), forward (through here)")
@click.option("--dp-ranks", "engine__dp_ranks", type=int, help="its data-parallel ranks")
@click.option("--model", "engine__model", help="the model's name")
@click.option("--served-name", "engine__served_names", multiple=True, help="a name that requests may use, any number")
@click.option("--api-endpoint", "engine__api_endpoints", multiple=True, help="an OpenAI endpoint that it serves")
@click.option("--text", "engine__text", help="tokenizer and template: the model's directory")
@click.option("--block-size", "engine__block_size", type=int, help="tokens in a KV block")
@click.option("--total-kv-blocks", "engine__total_kv_blocks", type=int, help="KV blocks of a rank")
@click.option("--max-num-seqs", "engine__max_num_seqs", type=int, help="requests decoded together")
@click.option("--max-num-batched-tokens", "engine__max_num_batched_tokens", type=int, help="tokens in one iteration")
@click.option("--max-seq-len", "engine__max_seq_len", type=int, help="prompt and answer together, in tokens")
@click.option("--worker-id", "worker__id", help="unique name in the fleet")
@click.option("--nats-url", "nats__url", help="the event log: nats://host:port")
@click.option("--port", "control__port", type=int, help="HTTP port of /metrics and /health; 0: any free one")
@click.option("--forward-port", "worker__port", type=int, help="HTTP port of forwarded requests; 0: any free one")
def attach(*, settings: AttachSettings, **_: object) -> None:
    """Bring one running engine into the fleet: its KV events, and, with --url, its load and its endpoint."""
    with suppress(StoppedUnconnected):
        run_process(lambda stop: run_attached(settings, stop, partial(print, flush=True)))


async def run_attached(settings: AttachSettings, stop: asyncio.Event, report: Callable[[str], None]) -> None:
    """Represent the engine until `stop` is set; `report` receives one line: what was found, and the status page.

    Raises: as `AttachedWorker.run` and `EventLog.connect`, and `PortUsed` for the status page's port.
    """
    settings = settings.model_copy(update={"worker": settings.worker.identified()})
    check(settings)
    async with AsyncExitStack() as cleanup:
        name = f"worker-agent {settings.worker.id}"
        log = await cleanup.enter_async_context(connected_log(settings.nats, name, awaited_until=stop))
        context = zmq.asyncio.Context()
        cleanup.callback(context.destroy, linger=0)
        instance, has_requests = uuid.uuid4().hex[:16], settings.engine.requests != "direct"
        tracing = opened_tracing(settings.tracing, os.environ, instance, service=SERVICE, has_requests=has_requests)
        host = Host(log, context, Clock(), FleetGate(settings.nats.fleet_secrets), load_text, tracing)
        worker = AttachedWorker(settings, host, lambda line, _: report(f"streams of {line}; status on {at}"))
        http = status_server(settings.control, log, tracing, lambda: worker.consolidators, families=worker.families)
        await http.start()
        at = url_of(settings.control.host, http.port)
        spans = [] if tracing is None else [tracing.exporter.part(1)]
        parts = [Part("worker", worker.run, 0), *spans, Part("http", http.run, 1, dict), Part("event-log", log.run, 2)]
        await run_parts(parts, stop=stop, drain_s=worker.drain_s + _MARGIN_S)
