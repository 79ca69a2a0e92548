"""Where an engine publishes its KV events itself, by its own arguments (TensorRT-LLM's ZMQ streaming).

    kv_cache_config.kv_events_config          the engine
    ---------------------------------------   ---------------------------------------------------------------------
    not given, or not enabled                 keeps events until it is polled
    enabled, `publisher` "null"               likewise: it sends them nowhere
    enabled, `publisher` zmq, or not given    publishes: a socket for each attention-DP rank, port of `endpoint` + rank
    and `replay_endpoint`                     answers replays likewise; without one every hole is a loss

The ranks are counted over all nodes, `gpus_per_node` on each, in the order of the nodes. Their hosts:

    all ranks fit on one node                 this machine: the agent runs beside its engine
    else a configured list                    its hosts, one a node
    else `SLURM_STEP_NODELIST`                likewise (`worker_agent/engines/trtllm/slurm_nodes.py`)

An endpoint that names a host (TensorRT-LLM binds it) is one node's: with several there must be a wildcard in its place.
The engine refuses to stream with pipeline or context parallelism; it needs `TLLM_KV_CACHE_MANAGER_V2_BACKEND=python`.

Source: `docs/SOURCES.md` E1.1, E3.5; `docs/SOURCES.md` D6.4.
"""

import re
from collections.abc import Sequence

from kv_protocol.errors import LimitExceeded
from worker_agent.engine_args.arguments import EngineArgs
from worker_agent.engine_args.rules import streams_events
from worker_agent.engines.trtllm.slurm_nodes import expanded
from worker_agent.events.consolidation import Origin
from worker_agent.events.engine_event_subscriber import PublisherAddress
from worker_agent.events.mirror import ENGINE
from worker_agent.events.publishers import PORT_MAX, checked_endpoint, rank_endpoint

ENDPOINT_DEFAULT = "tcp://*:5557"
_CONFIG = ("kv_cache_config", "kv_events_config")
_TCP = re.compile(r"tcp://(.+):([0-9]{1,5})")
_WILDCARDS = ("*", "0.0.0.0", "[::]")  # noqa: S104 - what an engine binds
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:]{2,45}\]")


def engine_publishers(
    args: EngineArgs, *, gpus_per_node: int = 0, hosts: Sequence[str] = (), nodelist: str = ""
) -> tuple[PublisherAddress, ...]:
    """Return the publishers of an engine that streams, in the order of its ranks; () of one that does not.

    `gpus_per_node` 0: as the arguments say, else one node has all. `nodelist` is `SLURM_STEP_NODELIST`.

    Raises:
        LimitExceeded: an address, port or host may not be; the message names the argument, found and allowed.
    """
    if not streams_events(args.tree):
        return ()
    ranks = args.attention_dp_size
    nodes = _nodes(ranks, gpus_per_node or args.value("gpus_per_node") or ranks, hosts, nodelist)
    publish = args.value(*_CONFIG, "endpoint") or ENDPOINT_DEFAULT
    replay = args.value(*_CONFIG, "replay_endpoint") or ""
    _check_apart(publish, replay, ranks)
    return tuple(
        PublisherAddress(
            Origin(ENGINE, dp_rank if ranks > 1 else None),
            _address("endpoint", publish, host, dp_rank, len(set(nodes))),
            replay and _address("replay_endpoint", replay, host, dp_rank, len(set(nodes))),
        )
        for dp_rank, host in enumerate(nodes)
    )


def _nodes(ranks: int, gpus_per_node: int, hosts: Sequence[str], nodelist: str) -> list[str]:
    """Return each rank's host; empty: this machine."""
    if ranks <= gpus_per_node:
        return [""] * ranks
    needed = -(-ranks // gpus_per_node)
    known = tuple(hosts) or expanded(nodelist)
    if len(known) < needed:
        allowed = f"{needed}, one for each {gpus_per_node} of {ranks} ranks, configured or in SLURM_STEP_NODELIST"
        raise LimitExceeded("hosts of KV events", f"{len(known)} hosts", allowed)
    wrong = [host for host in known if not _HOST.fullmatch(host)]
    if wrong:
        raise LimitExceeded("hosts of KV events", wrong[0], "a host's name, or its address")
    return [known[dp_rank // gpus_per_node] for dp_rank in range(ranks)]


def _address(field: str, endpoint: str, host: str, dp_rank: int, nodes: int) -> str:
    name = f"kv_events_config.{field}"
    found = _TCP.fullmatch(endpoint)
    if found is not None and found[1] in _WILDCARDS:
        endpoint = f"tcp://{host or '127.0.0.1'}:{found[2]}"
    elif nodes > 1:
        raise LimitExceeded(name, endpoint, "tcp://*:port, where ranks are on several nodes")
    try:
        return rank_endpoint(checked_endpoint(name, endpoint, allow_remote=True), dp_rank)
    except ValueError as error:
        raise LimitExceeded(name, endpoint, f"tcp://host:port or ipc://path of {dp_rank + 1} ranks: {error}") from error


def _check_apart(publish: str, replay: str, ranks: int) -> None:
    """Check that publishers and replays have `ranks` ports each, and share none."""
    ports = [int(found[2]) for found in map(_TCP.fullmatch, (publish, replay)) if found is not None]
    is_twice = publish == replay or (len(ports) == 2 and abs(ports[0] - ports[1]) < ranks)  # noqa: PLR2004 - both
    if replay and is_twice:
        allowed = f"{ranks} ports of its own, up to {PORT_MAX}: those of endpoint are {publish} and the next"
        raise LimitExceeded("kv_events_config.replay_endpoint", replay, allowed)
