"""The version whose public surface this package has. Source: `SURFACE.md`, "Version"."""

__version__ = "1.3.0rc29"
