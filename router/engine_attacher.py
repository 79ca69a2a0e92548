"""Attaches engines in the router's own process, as `worker-agent attach` does in another.

    listed          in the watched list `workers_from`: attached while it is in the list
    added           in `workers`, or over `POST /v1/workers`: attached until it is removed, or the router ends
    not attached    the reason is logged once, the try repeated every `RETRY_S`; other workers are not affected

The list is a file, read again each second, without its empty lines and those that begin with #; or dns://name:port,
where each address of the name is an engine at http://address:port. While a list cannot be read the engines stay as they
are; the reason is logged once.

The agent's modules are imported when the first engine is to be attached.
"""

import asyncio
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from prometheus_client.core import Metric
from pydantic import ValidationError

from kv_protocol.fleet_gate import FleetGate
from kv_runtime.clock import Clock
from kv_runtime.config.loading import ConfigurationError
from kv_runtime.config.words import allowed
from kv_runtime.event_log import EventLog
from kv_runtime.http.hosts import url_of
from kv_runtime.supervise import until
from kv_runtime.telemetry import Family, by_name, gauge
from kv_runtime.text.loading import load_text, local_directory
from kv_runtime.text.model import Text
from router.config import DNS, WORKERS_MAX, RouterSettings, WorkerAddress, worker_address

if TYPE_CHECKING:
    from worker_agent.attached.worker import AttachedWorker, Host

_BYTES_MAX = 1 << 20
FILE_PERIOD_S, DNS_PERIOD_S = 1.0, 5.0
RETRY_S = 5.0
_WAIT_S = 1.0
_log = structlog.get_logger("workers")


class WorkerList:
    """The list at `place`."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._problem = ""
        self.period_s = DNS_PERIOD_S if place.startswith(DNS) else FILE_PERIOD_S
        """How long to wait before it is read again."""

    async def read(self) -> tuple[WorkerAddress, ...] | None:
        """Return what is in the list now; None if it cannot be read."""
        try:
            texts = await (self._resolved() if self._place.startswith(DNS) else asyncio.to_thread(self._lines))
            found = _addresses(texts)
        except (OSError, ValueError) as error:
            if self._problem != str(error):
                _log.warning("worker_list_unreadable", list=self._place, reason=str(error))
            self._problem = str(error)
            return None
        self._problem = ""
        return found

    def _lines(self) -> list[str]:
        with Path(self._place).open("rb") as file:
            content = file.read(_BYTES_MAX + 1)
        if len(content) > _BYTES_MAX:
            raise ValueError(f"found more than {_BYTES_MAX} bytes, allowed {_BYTES_MAX}")
        lines = (line.strip() for line in content.decode().splitlines())
        return [line for line in lines if line and not line.startswith("#")]

    async def _resolved(self) -> list[str]:
        name, _, port = self._place.removeprefix(DNS).rpartition(":")
        found = await asyncio.get_running_loop().getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
        hosts = sorted({str(each[4][0]) for each in found})
        return [url_of(host, int(port)) for host in hosts]


def _addresses(texts: list[str]) -> tuple[WorkerAddress, ...]:
    if len(texts) > WORKERS_MAX:
        raise ValueError(f"found {len(texts)} engines, allowed {WORKERS_MAX}")
    return tuple(dict.fromkeys(map(worker_address, texts)))


class _Engine:
    """One engine. `worker` is None between two tries to attach it; `is_listed`: it is in the watched list."""

    def __init__(self, address: WorkerAddress, *, is_listed: bool = False) -> None:
        self.address, self.is_listed = address, is_listed
        self.stop = asyncio.Event()
        self.problem = ""
        self.worker: AttachedWorker | None = None

    @property
    def is_attached(self) -> bool:
        return self.worker is not None and bool(self.worker.consolidators)


class EngineAttacher:
    """Attaches engines. `report` receives a line and the model for each that was attached.

    `texts`: the tokenizers that are loaded already, by directory.
    """

    def __init__(
        self,
        settings: RouterSettings,
        log: EventLog,
        clock: Clock,
        texts: Mapping[str, Text],
        report: Callable[[str, str], None],
    ) -> None:
        self._settings, self._event_log, self._clock, self._report = settings, log, clock, report
        self._texts = dict(texts)
        self._engines = {each.worker_id: _Engine(each) for each in map(worker_address, settings.workers)}
        for engine in self._engines.values():
            agent_settings(engine.address, settings)  # raises for an option that no agent knows
        self._list = WorkerList(settings.workers_from) if settings.workers_from else None
        self._group: asyncio.TaskGroup | None = None
        self._cleanup = ExitStack()

    def add(self, text: str) -> str:
        """Attach the engine of this address, and return its worker id; raise `ValueError` if that is not possible."""
        address = worker_address(text)
        if address.worker_id in self._engines:
            raise ValueError(f"found {address.worker_id}, which is known already, allowed another id")
        if len(self._engines) >= WORKERS_MAX:
            raise ValueError(f"found {WORKERS_MAX + 1} engines, allowed {WORKERS_MAX}")
        try:
            agent_settings(address, self._settings)
        except ConfigurationError as error:
            raise ValueError("; ".join(error.problems)) from error
        self._start(_Engine(address))
        return address.worker_id

    def remove(self, worker_id: str) -> bool:
        """Let the engine leave the fleet; return False if no engine has this id."""
        engine = self._engines.get(worker_id)
        if engine is not None:
            engine.stop.set()
        return engine is not None

    def waiting(self) -> list[dict[str, str]]:
        """Return the engines that are not attached, and why not."""
        return [
            {"worker_id": name, "url": each.address.url, "reason": each.problem or "it does not answer"}
            for name, each in self._engines.items()
            if not each.is_attached
        ]

    def families(self) -> Iterator[Family]:
        """Yield how many engines are attached, and the metrics of their agents."""
        attached = [each.worker for each in self._engines.values() if each.worker is not None and each.is_attached]
        meaning = "Engines that the router attaches itself, by whether they are attached"
        counts = {"attached": len(attached), "waiting": len(self._engines) - len(attached)}
        yield gauge("attached_engines", meaning, ("state",), by_name((), counts))
        if attached:
            from worker_agent.events.metrics import consolidator_families  # noqa: PLC0415 - as the agent's other modules

            yield from consolidator_families([one for each in attached for one in each.consolidators])
            yield from _merged(family for each in attached for family in each.families())

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the engines attached until `stop` is set; then let them leave."""
        with self._cleanup:
            async with asyncio.TaskGroup() as self._group:
                for engine in tuple(self._engines.values()):
                    self._start(engine)
                while not stop.is_set():
                    await until(stop, self._follow_list())
                for engine in self._engines.values():
                    engine.stop.set()

    async def _follow_list(self) -> None:
        """Attach engines that are new in the list, detach those that left it, and wait until it is to be read again."""
        if self._list is None:
            await asyncio.Event().wait()
            return
        found = await self._list.read()
        if found is not None:
            listed = {each.worker_id: each for each in found}
            for worker_id, engine in self._engines.items():
                if engine.is_listed and listed.get(worker_id) != engine.address:
                    engine.stop.set()
            for worker_id, address in listed.items():
                if worker_id not in self._engines:
                    self._start(_Engine(address, is_listed=True))
        await self._clock.sleep(self._list.period_s)

    def _start(self, engine: _Engine) -> None:
        self._engines[engine.address.worker_id] = engine
        if self._group is not None:  # else `run` starts it
            self._group.create_task(self._attach(engine), name=f"worker {engine.address.worker_id}")

    async def _attach(self, engine: _Engine) -> None:
        """Attach the engine, again and again, until its `stop` is set."""
        from worker_agent.attached.worker import AttachedWorker  # noqa: PLC0415 - not every router needs the agent

        worker_id = engine.address.worker_id
        while not engine.stop.is_set():
            try:
                settings = agent_settings(engine.address, self._settings)
                engine.worker = AttachedWorker(settings, self._host, partial(self._on_attached, engine))
                await engine.worker.run(engine.stop)
            except Exception as error:  # noqa: BLE001 - one engine's error must not end the others
                reason = str(error) if not isinstance(error, ConfigurationError) else "; ".join(error.problems)
                if reason != engine.problem:
                    _log.warning("worker_not_attached", worker=worker_id, url=engine.address.url, reason=reason)
                engine.problem = reason
            engine.worker = None
            await self._clock.wait(engine.stop, RETRY_S)
        if self._engines.get(worker_id) is engine:
            del self._engines[worker_id]

    def _on_attached(self, engine: _Engine, line: str, model: str) -> None:
        engine.problem = ""
        self._report(line, model)

    @cached_property
    def _host(self) -> "Host":
        import zmq.asyncio  # noqa: PLC0415 - likewise

        from worker_agent.attached.worker import Host  # noqa: PLC0415 - likewise

        context = zmq.asyncio.Context()
        self._cleanup.callback(context.destroy, linger=0)
        gate = FleetGate(self._settings.nats.fleet_secrets)
        return Host(self._event_log, context, self._clock, gate, self._text)

    def _text(self, path: str) -> Text:
        if path not in self._texts:
            self._texts[path] = load_text(path)
        return self._texts[path]


def agent_settings(address: WorkerAddress, settings: RouterSettings) -> Any:  # noqa: ANN401 - imported when needed
    """Return the settings with which an agent would attach this engine; raise `ConfigurationError` for its options."""
    from worker_agent.attached.config import AttachSettings  # noqa: PLC0415 - not every router needs the agent

    engine = {
        "kind": address.engine,
        "base_url": address.url,
        "api_key": settings.data.worker_token,
        "text": settings.tokens.text,
        "publish_endpoint": address.kv_events,
        "replay_endpoint": address.replay_endpoint,
        "allow_remote": True,
    }
    try:
        return AttachSettings.model_validate({"worker": {"id": address.worker_id}, "engine": engine})
    except ValidationError as error:
        raise ConfigurationError([f"{address.url}: {allowed(each)}" for each in error.errors()]) from error


async def stated_directory(settings: RouterSettings, clock: Clock, stop: asyncio.Event) -> str:
    """Return the first directory that an engine states and this machine has; wait for an answer. Empty: `stop` was set.

    Raises:
        ConfigurationError: no stated directory is on this machine; the error has the command to run.
    """
    from worker_agent.attached.worker import reported_facts  # noqa: PLC0415 - likewise

    named = [agent_settings(worker_address(each), settings) for each in settings.workers]
    listed = WorkerList(settings.workers_from) if settings.workers_from else None
    is_logged = False
    while not stop.is_set():
        asked = list(named)
        for address in (await listed.read() if listed else None) or ():
            with suppress(ConfigurationError):  # it is logged when the engine is to be attached
                asked.append(agent_settings(address, settings))
        tries = map(reported_facts, asked)
        answers = [each for each in await asyncio.gather(*tries) if each is not None]
        if found := next(filter(None, (local_directory(each.directory) for each in answers)), ""):
            return found
        if answers:
            stated = ", ".join(repr(each.directory) for each in answers if each.directory) or "none"
            problem = f"tokens.text: found {stated} that the engines state, and none of it on this machine"
            raise ConfigurationError([f"{problem}, allowed the model's directory: router --worker URL --text DIR"])
        if not is_logged:
            _log.warning("waiting_for_workers", urls=[each.engine.base_url for each in asked])
            is_logged = True
        await clock.wait(stop, _WAIT_S)
    return ""


def _merged(families: Iterable[Family]) -> Iterator[Family]:
    """Yield one family for each name, with the samples of all families of that name."""
    found: dict[str, Family] = {}
    for each in families:
        merged = found.setdefault(each.name, Metric(each.name, each.documentation, each.type))
        merged.samples += each.samples
    yield from found.values()
