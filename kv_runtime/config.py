"""Configuration as values: one frozen tree per process, read once. Flag > environment `KVROUTER_*` > YAML > default.

`KVROUTER_POLICY__TEMPERATURE=0.2` sets `policy.temperature`. Every problem is reported together, with its path, what
was found and what is allowed. The sections here are those that several processes share; each process has its own tree.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from kv_runtime.http import is_loopback

ENV_PREFIX = "KVROUTER_"
_NESTED = "__"


class ConfigurationError(Exception):
    """One or more values may not be as they are; `problems` names each by its path."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(["configuration:", *(f"  {problem}" for problem in problems)]))
        self.problems = problems


class Section(BaseModel):
    """A branch of the tree: frozen, and without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Settings(BaseSettings):
    """A process's whole tree."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=ENV_PREFIX, env_nested_delimiter=_NESTED, case_sensitive=False
    )


class NatsSection(Section):
    """The event log."""

    url: str = Field("", description="nats://host:port of a running server; empty: the router embeds one")
    port: int = Field(4222, ge=0, le=65535, description="port of the embedded server on 127.0.0.1; 0: any free one")
    store_dir: str = Field(
        "", description="where the embedded server keeps the log; empty: a directory removed at stop"
    )
    credentials: SecretStr = Field(SecretStr(""), description="token for the server, where it wants one")
    events_max_age_s: float = Field(3600.0, ge=1, le=30 * 86400, description="how long KV_EVENTS keeps; costs disk")
    events_max_bytes: int = Field(
        1 << 30, ge=1 << 20, le=1 << 40, description="what KV_EVENTS keeps, bytes of disk; cold starts read all of it"
    )


class ControlSection(Section):
    """The control plane: administration, decisions, metrics."""

    host: str = Field("127.0.0.1", description="address to bind; anything but loopback needs a token")
    port: int = Field(8001, ge=0, le=65535, description="0: any free one")
    token: SecretStr = Field(SecretStr(""), description="bearer token; required unless host is loopback")

    @model_validator(mode="after")
    def _token_beyond_loopback(self) -> "ControlSection":
        if not is_loopback(self.host) and not self.token.get_secret_value():
            raise ValueError(f"host is {self.host}: beyond loopback a token is required")
        return self


class IndexSection(Section):
    """The prefix index and the streams that feed it."""

    implementation: Literal["python"] = Field("python", description="which tree holds the prefixes")
    parked_blocks_max: int = Field(
        65_536, ge=0, le=10_000_000, description="blocks that may wait for an unknown parent; more costs memory"
    )
    parked_ttl_s: float = Field(5.0, gt=0, le=600, description="how long they wait before their rank is resynced")
    behind_s: float = Field(
        2.0, gt=0, le=60, description="how long a stream may be behind its heartbeat before it is resynced"
    )
    answer_s: float = Field(2.0, gt=0, le=60, description="how long a dump may take before it is asked again")


class TelemetrySection(Section):
    """Logs."""

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="the least that is logged")
    log_format: Literal["auto", "json", "console"] = Field("auto", description="auto: console on a terminal, else json")


SettingsT = TypeVar("SettingsT", bound=Settings)


def load_settings(
    kind: type[SettingsT],
    *,
    file: Path | None = None,
    assignments: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> SettingsT:
    """Return the effective tree.

    `assignments` are `section.key=value` flags, `flags` maps dotted paths (`nats.url`) to values, None: not given.

    Raises:
        ConfigurationError: with every problem found.
    """
    problems: list[str] = []
    tree = _from_file(file, problems) if file else {}
    problems += _unknown_variables(kind)
    _merge(tree, EnvSettingsSource(kind)())
    for path, value in [*_assigned(assignments, problems), *(flags or {}).items()]:
        if value is not None:
            _merge(tree, _nest(path.split("."), value))
    try:
        settings = kind.model_validate(tree)
    except ValidationError as error:
        raise ConfigurationError([*problems, *map(_problem, error.errors())]) from error
    if problems:
        raise ConfigurationError(problems)
    return settings


def config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a click command the flags that every process has: `--config`, `--set`, `--print-config`."""
    for option in (
        click.option("--print-config", is_flag=True, help="print the effective configuration and end"),
        click.option("--set", "assignments", multiple=True, metavar="SECTION.KEY=VALUE", help="set any field"),
        click.option("--config", "file", type=click.Path(path_type=Path), help="YAML file with the sections"),
    ):
        command = option(command)
    return command


def render(settings: Settings) -> str:
    """Return the tree as YAML that loads again; secrets are masked."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)


def _assigned(assignments: Iterable[str], problems: list[str]) -> Iterator[tuple[str, Any]]:
    for text in assignments:
        path, found, value = text.partition("=")
        try:
            if found and path.strip():
                yield path.strip(), yaml.safe_load(value)
            else:
                problems.append(f"--set: found {text!r}, allowed section.key=value")
        except yaml.YAMLError as error:
            problems.append(f"--set {path}: {error}")


def _from_file(file: Path, problems: list[str]) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problems.append(f"{file}: {error}")
        return {}
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        problems.append(f"{file}: found {type(tree).__name__}, allowed a mapping of sections")
        return {}
    return tree


def _unknown_variables(kind: type[Settings]) -> list[str]:
    return [
        f"{name}: no such setting"
        for name in sorted(os.environ)
        if name.startswith(ENV_PREFIX) and not _is_known(kind, name.removeprefix(ENV_PREFIX).lower().split(_NESTED))
    ]


def _is_known(model: type[BaseModel], path: list[str]) -> bool:
    field = model.model_fields.get(path[0])
    if field is None:
        return False
    kind = field.annotation
    if len(path) == 1 or not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return True
    return _is_known(kind, path[1:])


def _nest(path: list[str], value: object) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    assert isinstance(value, dict)
    return value


def _merge(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _problem(error: Any) -> str:  # noqa: ANN401 - pydantic's ErrorDetails, a TypedDict it does not export for good
    path = ".".join(map(str, error["loc"]))
    found = "" if error["type"] in ("missing", "extra_forbidden") or "token" in path else f"found {error['input']!r}, "
    return f"{path}: {found}{error['msg']}"
