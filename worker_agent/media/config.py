"""The configuration sections of media and of encode workers."""

from ipaddress import ip_network
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, IPvAnyNetwork, field_validator

from kv_protocol.images import IMAGE_TOKENS_MAX
from kv_runtime.config.sections import Section


def _network(given: Any) -> Any:  # noqa: ANN401 - what a configuration has
    """Return the network in a text. The library takes numbers, too, and would open another network than was meant."""
    if not isinstance(given, str):
        raise ValueError(f"found {given!r}, allowed a network as text, like 10.1.0.0/16")  # noqa: TRY004 - as pydantic wants
    return ip_network(given)


_PORT = Annotated[int, Field(ge=1, le=65535)]
_NETWORK = Annotated[IPvAnyNetwork, BeforeValidator(_network)]


class MediaSection(Section):
    """Images of requests: accepted sizes and sources; by default only `data:` URLs."""

    part_bytes_max: int = Field(
        50 << 20,
        ge=1,
        le=1 << 32,
        description="bytes of one image; all images of a request together: as many, at least 128 MiB",
    )
    directories: tuple[str, ...] = Field(
        (), max_length=64, description="absolute paths whose files requests may name; empty: no files"
    )
    schemes: tuple[Literal["https", "http"], ...] = Field(
        (), description="URL schemes that are fetched for requests; empty: none"
    )
    ports: tuple[_PORT, ...] = Field((80, 443), max_length=64, description="ports that media are fetched from")
    networks: tuple[_NETWORK, ...] = Field(
        (),
        max_length=64,
        description="networks, besides public ones, to fetch from (10.1.0.0/16): clients can read there",
    )
    cache_bytes_max: int = Field(0, ge=0, le=1 << 40, description="embeddings kept for media that come again; 0: none")

    @field_validator("directories")
    @classmethod
    def _absolute(cls, directories: tuple[str, ...]) -> tuple[str, ...]:
        for directory in directories:
            if not directory.startswith("/") or not directory.strip("/") or ".." in directory.split("/"):
                raise ValueError(f"found {directory!r}, allowed absolute paths without `..`, and not the root")
        return directories


class ImageModelSection(Section):
    """The model's image token and placeholder, if its `config.json` lacks them or differs."""

    placeholder: str = Field(
        "", max_length=256, description="what stands for an image in a chat's text; empty: by the model's configuration"
    )
    token_id: int | None = Field(
        None,
        ge=0,
        le=(1 << 32) - 1,
        description="the token of an image in the placeholder; none: by the model's configuration",
    )
    tokens_per_image: int | None = Field(
        None,
        ge=1,
        le=IMAGE_TOKENS_MAX,
        description="tokens of an image, if all images have as many; none: by the model's configuration",
    )
    cached_token_id: int | None = Field(
        None, ge=0, le=(1 << 32) - 1, description="token id by which the engine caches images; none: the image token"
    )


class EncodeSection(Section):
    """Encode workers for a prefill or aggregated worker's images: those of its model that are in the fleet."""

    form: Literal["none", "handles", "embeddings"] = Field(
        "none",
        description="none: this worker's engine encodes images. handles: references to memory, which only an encode "
        "worker at this worker's address can share. embeddings: from any encode worker",
    )
