"""The sections of configuration that several processes share; each process has a tree of its own."""

import re
from typing import Any, Literal
from unicodedata import category

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationInfo, field_validator, model_validator

from kv_runtime.http.hosts import HostName, HostNames, is_loopback

_FLEET_KEY_CHARACTERS_MIN = 16
_INDEX_BYTES_MIN = 1 << 20
"""The least memory with which an index can store the blocks of a rank."""


LINES = "lines"
"""Annotates a text that may have several lines. Such a text must not get into an HTTP head, an address or a log."""


class Section(BaseModel):
    """A branch of the tree: frozen, without unknown keys, and without control characters in a text.

    Texts become heads, addresses, subjects and logs, where a newline would begin another line. One newline at the end
    of a secret is left out: mounted secrets have it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*")
    @classmethod
    def _of_one_line(cls, value: Any, info: ValidationInfo) -> Any:  # noqa: ANN401 - of any field
        is_free = info.field_name is not None and LINES in cls.model_fields[info.field_name].metadata
        return value if is_free else _of_one_line(value)


def _of_one_line(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, SecretStr):
        return SecretStr(_of_one_line(re.sub(r"\r?\n\Z", "", value.get_secret_value())))
    if isinstance(value, str) and any(category(character) == "Cc" for character in value):
        raise ValueError("allowed text without control characters")
    if type(value) is tuple:
        return tuple(map(_of_one_line, value))
    if isinstance(value, dict):
        return {_of_one_line(name): _of_one_line(each) for name, each in value.items()}
    return value


class Settings(Section):
    """A process's whole tree. A section that the tree sets by default is merged, field by field, with what is given."""

    @model_validator(mode="before")
    @classmethod
    def _own_defaults(cls, tree: dict[str, Any]) -> dict[str, Any]:
        own = {name: field.default for name, field in cls.model_fields.items()}
        return {
            name: {**own[name].model_dump(exclude_unset=True), **given}
            if isinstance(given, dict) and isinstance(own.get(name), Section)
            else given
            for name, given in tree.items()
        }


class BodyBoundsSection(Section):
    """Bounds of a request body's contents, for the sections of processes that read such bodies."""

    prompt_bytes_max: int = Field(
        8 << 20,
        ge=1024,
        le=1 << 30,
        description="JSON bytes of messages, prompts and documents without images; beyond it 413; token ids: a quarter"
        " as many; more holds up other requests for longer",
    )


class NatsClientSection(Section):
    """The event log: its server, and the fleet's keys."""

    url: str = Field("nats://127.0.0.1:4222", description="nats://host:port of a running server, or several by commas")
    user: str = Field("", max_length=256, description="user name for the server; empty: it wants a token, or nothing")
    credentials: SecretStr = Field(
        SecretStr(""), description="the user's password, or without nats.user a token, where the server wants one"
    )
    fleet_keys: tuple[SecretStr, ...] = Field(
        (),
        max_length=8,
        description="secrets of 16 characters and more that the fleet shares; the first signs fleet events, each"
        " verifies; empty: events are not signed, and not refused for it",
    )

    @field_validator("fleet_keys")
    @classmethod
    def _long_enough(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for at, key in enumerate(keys):
            if len(key.get_secret_value()) < _FLEET_KEY_CHARACTERS_MIN:
                raise ValueError(f"key {at} has fewer than {_FLEET_KEY_CHARACTERS_MIN} characters")
        return keys

    @property
    def fleet_secrets(self) -> tuple[bytes, ...]:
        """The bytes of `fleet_keys`."""
        return tuple(key.get_secret_value().encode() for key in self.fleet_keys)


class NatsSection(NatsClientSection):
    """The event log, for a process that creates its streams."""

    events_max_age_s: float = Field(3600.0, ge=1, le=30 * 86400, description="how long KV_EVENTS keeps; costs disk")
    events_max_bytes: int = Field(
        1 << 30, ge=1 << 20, le=1 << 40, description="what KV_EVENTS keeps, bytes of disk; time travel needs it"
    )
    replicas: Literal[1, 3, 5] = Field(
        1, description="servers of a cluster that have each stream and snapshot; more survive more, and cost as much"
    )
    snapshot_period_s: float = Field(
        300.0, ge=1, le=86400, description="age at which the index's snapshot is written anew; less costs disk and time"
    )
    snapshots_bytes_max: int = Field(
        1 << 30, ge=1 << 20, le=1 << 40, description="what KV_SNAPSHOTS keeps, bytes of disk; room for two is needed"
    )


class EmbeddedNatsSection(NatsSection):
    """The event log, for a process that can run its server."""

    url: str = Field(
        "", description="nats://host:port of a running server, or several by commas; empty: the router embeds one"
    )
    port: int = Field(4222, ge=0, le=65535, description="port of the embedded server on 127.0.0.1; 0: any free one")
    store_dir: str = Field(
        "", description="where the embedded server keeps the log; empty: a directory removed at stop"
    )


class ControlSection(Section):
    """The control plane: administration, decisions, metrics."""

    host: str = Field("127.0.0.1", description="address to bind; anything but loopback needs a token")
    port: int = Field(8001, ge=0, le=65535, description="0: any free one")
    token: SecretStr = Field(SecretStr(""), description="bearer token; required unless host is loopback")
    hosts: tuple[HostName, ...] = Field(
        (), max_length=64, description="names that requests without the token may call it by (Host), else 421; *: any"
    )

    @model_validator(mode="after")
    def _token_beyond_loopback(self) -> "ControlSection":
        if not is_loopback(self.host) and not self.token.get_secret_value():
            raise ValueError(f"host is {self.host}: beyond loopback a token is required")
        return self

    def host_names(self) -> HostNames:
        """Return the allowed names in `Host`."""
        return HostNames(self.host, self.hosts)


class IndexSection(Section):
    """The prefix index and the streams that feed it."""

    memory_bytes_max: int = Field(
        4 << 30,
        ge=0,
        le=1 << 44,
        description="bytes that the index may take, 1 MiB or more; 0: no limit; beyond it ranks are stale or refused",
    )

    @field_validator("memory_bytes_max")
    @classmethod
    def _fits_a_rank(cls, memory_bytes_max: int) -> int:
        if 0 < memory_bytes_max < _INDEX_BYTES_MIN:
            raise ValueError(f"0 (no limit) or {_INDEX_BYTES_MIN} and more are allowed")
        return memory_bytes_max


class TelemetrySection(Section):
    """Logs."""

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="the least that is logged")
