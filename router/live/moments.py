"""Past moments of the index: each is restored, and served, by a process of its own (`moment_process.py`).

POST /v1/moments {"at_s": T}       begin to restore the moment of a Unix time: 202 and its status
GET  /v1/moments, /v1/moments/{id}    how far that is, and why it failed
GET  /v1/prefix-tree?moment=ID     the tree of that moment, from its process

Routing shares neither memory nor event loop with such a process.
"""

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiohttp
import msgspec
import structlog
from aiohttp import web

from kv_protocol.errors import UNDECODABLE
from kv_runtime.clock import Clock
from kv_runtime.config.loading import ENV_PREFIX
from kv_runtime.config.sections import IndexSection, NatsSection
from kv_runtime.http.answers import error_response, json_response
from kv_runtime.process import child_environment
from kv_runtime.supervise import TaskSet
from kv_runtime.telemetry import Family, counter, gauge
from router.live.moment_process import MomentLimits, PastMoment

MOMENTS_MAX = 2
"""Moments that are kept; a further one takes the place of the least recently used."""
PROCESSES_MAX = 4
"""Processes of moments that are kept, and of dropped ones that still end."""
_INDEXER_AT = (sys.executable, "-m", "indexer", "at")

_log = structlog.get_logger("router")


class MomentAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/moments`: a Unix time in seconds."""

    at_s: float


class Moments:
    """The moments that one control plane keeps; a part of its process."""

    def __init__(
        self,
        url: str,
        nats: NatsSection,
        index: IndexSection,
        clock: Clock,
        *,
        limits: MomentLimits | None = None,
        program: Sequence[str] = _INDEXER_AT,
    ) -> None:
        """`url`: of the event log, which `nats.url` does not name if it is embedded. `program` is run for a moment."""
        self._environment = {
            **child_environment(),
            f"{ENV_PREFIX}NATS__URL": url,
            f"{ENV_PREFIX}NATS__USER": nats.user,
            f"{ENV_PREFIX}NATS__CREDENTIALS": nats.credentials.get_secret_value(),
            f"{ENV_PREFIX}INDEX": index.model_dump_json(),
        }
        self._clock, self._limits, self._program = clock, limits or MomentLimits(), program
        self._kept: dict[str, PastMoment] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._tasks: TaskSet | None = None
        self._directory: Path | None = None
        self._begun = self.failed_total = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Keep moments until `stop` is set; then their processes end."""
        try:
            async with TaskSet(PROCESSES_MAX) as tasks:
                self._tasks = tasks
                await stop.wait()
                self._tasks = None
                for keeper in self._keepers.values():
                    keeper.cancel()
        finally:
            self._tasks = None
            if self._directory is not None:
                shutil.rmtree(self._directory, ignore_errors=True)

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the routes, for an application to add."""
        return [
            web.post("/v1/moments", self._begin),
            web.get("/v1/moments", self._list),
            web.get("/v1/moments/{id}", self._status),
        ]

    def families(self) -> Iterator[Family]:
        """Yield the figures of the moments."""
        return moment_families(len(self._kept), self.failed_total)

    # ---------------------------------------------------------------------------------------------- the endpoints

    async def _begin(self, request: web.Request) -> web.Response:
        try:
            at_s = msgspec.json.decode(await request.read(), type=MomentAsked).at_s
        except UNDECODABLE as error:
            return error_response(400, str(error), "invalid_request_error", param="at_s")
        now_s = self._clock.wall_ns() / 1e9
        if not 0 <= at_s <= now_s:
            message = f"at_s: found {at_s}, allowed a Unix time in seconds, 0..{now_s:.3f}"
            return error_response(400, message, "invalid_request_error", param="at_s")
        try:
            moment = self._same(at_s) or self._opened(at_s)
        except OSError as error:
            return error_response(503, f"no directory for its socket: {error}", "server_error", code="no_directory")
        if moment is None:
            message = f"{PROCESSES_MAX} processes of moments run, or still end; try again"
            return error_response(409, message, "invalid_request_error", code="busy")
        return json_response(moment.status(), status=202)

    async def _list(self, _: web.Request) -> web.Response:
        return json_response({"moments": [moment.status() for moment in self._kept.values()]})

    async def _status(self, request: web.Request) -> web.Response:
        moment = self._kept.get(request.match_info["id"])
        if moment is None:
            return _unknown("id")
        moment.use()
        return json_response(moment.status())

    async def tree(self, request: web.Request) -> web.Response:
        """Answer `/v1/prefix-tree?moment=` with the page of the moment's process."""
        query = dict(request.query)
        moment = self._kept.get(query.pop("moment"))
        if moment is None:
            return _unknown("moment")
        if moment.state != "ready":
            message = moment.failure or "moment: it is being read; GET /v1/moments/{id} says how far"
            return error_response(409, message, "invalid_request_error", param="moment", code="moment_not_ready")
        moment.use()
        try:
            status, page = await moment.tree(query)
        except (OSError, aiohttp.ClientError, TimeoutError) as error:
            message = f"moment: its process does not answer: {str(error) or type(error).__name__}"
            return error_response(503, message, "server_error", param="moment", code="moment_away")
        return web.Response(status=status, body=page, content_type="application/json")

    # ---------------------------------------------------------------------------------------------- what is kept

    def _same(self, at_s: float) -> PastMoment | None:
        for moment in self._kept.values():
            if moment.at_s == at_s and not moment.failure:
                moment.use()
                return moment
        return None

    def _opened(self, at_s: float) -> PastMoment | None:
        """Return a new moment, in the place of a failed or the least recently used one; None: too many still end."""
        tasks = self._tasks
        if tasks is None or len(tasks) >= PROCESSES_MAX:
            return None
        if len(self._kept) >= MOMENTS_MAX:
            self._drop(min(self._kept.values(), key=lambda kept: (not kept.failure, kept.used_s)))
        self._begun += 1
        moment_id = f"m{self._begun}"
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="kv-router-moments-"))  # of mode 0700
        moment = PastMoment(moment_id, at_s, self._directory / f"{moment_id}.sock", self._clock, self._limits)
        self._kept[moment_id] = moment
        self._keepers[moment_id] = tasks.spawn(self._keep(moment), name=f"moment {moment_id}")
        return moment

    def _drop(self, moment: PastMoment) -> None:
        del self._kept[moment.moment_id]
        self._keepers.pop(moment.moment_id).cancel()

    async def _keep(self, moment: PastMoment) -> None:
        """Run the moment until it is over; a failed one stays listed for as long as an unused one."""
        if reason := await moment.run(self._program, self._environment):
            moment.failure = reason
            self.failed_total += 1
            _log.warning("moment_failed", at_s=moment.at_s, reason=reason)
            await self._clock.sleep(self._limits.idle_s)
        del self._kept[moment.moment_id], self._keepers[moment.moment_id]


def moment_families(kept: int, failed_total: int) -> Iterator[Family]:
    """Yield how many moments are kept, and how many failed."""
    yield gauge("moments", "Past moments of the index that are kept", rows=[((), kept)])
    failed = "Past moments that were not restored, or whose process ended"
    yield counter("moments_failed", failed, rows=[((), failed_total)])


def _unknown(param: str) -> web.Response:
    message = f"{param}: found a moment that is not kept, allowed one of GET /v1/moments"
    return error_response(404, message, "invalid_request_error", param=param, code="moment_unknown")
