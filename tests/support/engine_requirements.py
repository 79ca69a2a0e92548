"""What engines require, as recorded in tests/golden/engine_requirements/: each file names its source."""

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.support.paths import RECORDINGS

DIRECTORY = RECORDINGS / "engine_requirements"
ENGINES = (
    "tensorrt-llm-1.0.0",
    "tensorrt-llm-1.2.1",
    "tensorrt-llm-1.3.0rc29",
    "tensorrt-llm-1.4.0rc1",
    "vllm-0.24.0",
    "vllm-0.33.0",
    "sglang-0.5.23",
)
PYTHON = "3.12"
"""The release of Python for which environments are resolved: every engine here supports it."""
_ENVIRONMENT: dict[str, str] = {
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.0",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "extra": "",
}


def required_by(distribution: str) -> list[Requirement]:
    """Return what the recorded release, as `name-version`, requires on Linux."""
    lines = (DIRECTORY / f"{distribution}.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return [each for each in found if each.marker is None or each.marker.evaluate({**_ENVIRONMENT})]


def required_with_pins(engine: str) -> list[Requirement]:
    """Return what the engine requires, and what recorded releases that it pins require."""
    direct = required_by(engine)
    pinned = [f"{canonicalize_name(each.name)}-{str(each.specifier).removeprefix('==')}" for each in direct]
    return direct + [each for name in pinned if (DIRECTORY / f"{name}.txt").exists() for each in required_by(name)]


def overlap(*ranges: SpecifierSet) -> bool:
    """Return whether some version is in all ranges; each has a floor, a pin, or begins at 0."""
    bounds = [Version(each.version.removesuffix(".*")) for one in ranges for each in one] + [Version("0")]
    return any(all(one.contains(version, prereleases=True) for one in ranges) for version in bounds)
