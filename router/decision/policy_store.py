"""Changes the policy while requests flow, by the rules of the section `policy`, and keeps it over a restart.

    PATCH   the named fields change, the others stay
    PUT     the named fields are set, the others get their defaults

What the router is created with (`seed`, `user_modes`, bounds of the approximate index and of sessions) cannot change
while it runs. A decision is taken with the old policy or with the new one, never with a mix. A policy that was changed
over `/v1/policy` is kept in a file in `state.dir`:

    command line (`--mode`, `--set policy...`)  >  the file  >  environment, YAML, defaults       field by field

The file has only the fields that were changed; the configuration sets the rest. It is written atomically. A file that
cannot be used is refused at the start: a router that ignored it would route by an unexpected policy.
"""

import asyncio
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import structlog
from pydantic import ValidationError

from kv_protocol.errors import UNDECODABLE, shortened
from kv_protocol.openai.errors import as_json
from kv_runtime.config.loading import ConfigurationError, unknown_key
from kv_runtime.files import replace_file
from router.decision.policies import MODES, Mode
from router.decision.policy import CostParameters, Policy
from router.decision.policy_config import PolicySection, refused

PROBLEMS_MAX = 8
"""An error names this many problems, and states how many more there are."""
FIELDS = (*(name for name in Policy.__struct_fields__ if name != "parameters"), *CostParameters.__struct_fields__)


def fields_of(policy: Policy) -> dict[str, Any]:
    """Return the policy's fields by their names in the configuration."""
    own: dict[str, Any] = msgspec.to_builtins(policy)
    return {**own.pop("parameters"), **own}


def swapped(policy: Policy, named: Mapping[str, Any], modes: Mapping[str, Mode], *, replace_all: bool) -> Policy:
    """Return the policy with these fields; the others stay, or with `replace_all` get their defaults.

    Raises:
        ConfigurationError: a name is no field of a policy, a field cannot change while the router runs, or a value is
            not allowed. The error names the first `PROBLEMS_MAX` problems.
    """
    own = {name: value for name, value in named.items() if name in FIELDS}
    foreign = [name for name in named if name not in FIELDS]
    problems = [_foreign(name, named[name]) for name in foreign[:PROBLEMS_MAX]]
    user_modes = tuple(name for name in modes if name not in MODES)
    try:
        section = PolicySection(user_modes=user_modes, **{**({} if replace_all else fields_of(policy)), **own})
    except ValidationError as error:
        problems += [refused(each, "policy.") for each in error.errors(include_url=False)]
    if problems:
        more = len(foreign[PROBLEMS_MAX:]) + len(problems[PROBLEMS_MAX:])
        raise ConfigurationError(problems[:PROBLEMS_MAX] + [f"and {more} more"] * bool(more))
    return section.policy()


def _foreign(name: str, value: object) -> str:
    if name in PolicySection.model_fields:
        return f"policy.{name}: found {as_json(value)}, allowed only at the start of the router"
    return f"policy.{shortened(name)}: {unknown_key(name, FIELDS)}"


_NAME = "policy.json"
_BYTES_MAX = 1 << 20

_log = structlog.get_logger("router")


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stored file."""

    version: Literal[1]
    fields: dict[str, Any]


class PolicyNotStored(Exception):
    """The policy was not changed, because it could not be written."""


class PolicyStore:
    """Stores the changed fields of one router's policy; without a directory they are not stored."""

    def __init__(self, directory: str, configured: Policy, modes: Mapping[str, Mode]) -> None:
        """`configured` is the policy of the configuration, command line included."""
        self.configured = self.initial = configured
        self.modes = modes
        self._path = Path(directory) / _NAME if directory else None
        self._fields: dict[str, Any] = {}
        self.writing = asyncio.Lock()
        """Held from reading the policy in force to changing it: changes are serialised."""

    def restore(self, given: Collection[str] = ()) -> None:
        """Set `initial`, the policy to start with; `given` are fields that the command line names, which win.

        Raises:
            ConfigurationError: the directory or the file cannot be used.
        """
        if self._path is None:
            return
        _prepare(self._path.parent)
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            problem = f"state.dir: {self._path}: found what cannot be read ({error.strerror}), allowed a file"
            raise ConfigurationError([problem]) from error
        try:
            named = {name: value for name, value in _decoded(data).items() if name not in given}
            self.initial = swapped(self.configured, named, self.modes, replace_all=False)
        except ConfigurationError as error:
            hint = "mend or remove the file; without it the policy is that of the configuration"
            problems = [f"state.dir: {self._path}: {problem}; {hint}" for problem in error.problems]
            raise ConfigurationError(problems) from error
        self._fields = named
        if named:
            _log.info("policy_restored", path=str(self._path), fields=named)

    def begin_with(self, body: bytes) -> None:
        """Set `initial` to the policy in force in other processes, the body of a `PUT /v1/policy`; empty: it stays."""
        if body:
            self.initial = swapped(self.configured, msgspec.json.decode(body), self.modes, replace_all=True)

    async def keep(self, changed: Mapping[str, Any]) -> None:
        """Store these fields beside those stored before; raise `PolicyNotStored` if that fails."""
        await self._write({**self._fields, **changed})

    async def clear(self) -> None:
        """Remove all stored fields; raise `PolicyNotStored` if that fails."""
        await self._write({})

    async def _write(self, fields: dict[str, Any]) -> None:
        if (path := self._path) is not None:
            data = msgspec.json.encode(_Stored(1, fields))
            try:
                await asyncio.to_thread(replace_file, path, data)  # a disk may be slow
            except OSError as error:
                raise PolicyNotStored(f"state.dir: {path} cannot be written: {error.strerror}") from error
        self._fields = fields


def _prepare(directory: Path) -> None:
    """Create the directory, and check that files can be written into it."""
    needed = "allowed a directory that the router can make and write into"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ConfigurationError([f"state.dir: found {directory}, which is a file, {needed}"]) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        problem = f"state.dir: found {directory}, which cannot be made ({reason}), {needed}"
        raise ConfigurationError([problem]) from error
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigurationError([f"state.dir: found {directory}, which the router may not write into, {needed}"])


def _decoded(data: bytes) -> dict[str, Any]:
    if len(data) > _BYTES_MAX:
        raise ConfigurationError([f"found {len(data)} bytes, allowed {_BYTES_MAX}"])
    try:
        return msgspec.json.decode(data, type=_Stored).fields
    except UNDECODABLE as error:
        raise ConfigurationError([f"found no stored policy ({error})"]) from error
