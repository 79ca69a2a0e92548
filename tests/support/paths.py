"""Where tests find the repository's files, recorded data, and the data beside the repository."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORDINGS = ROOT / "tests" / "golden"
"""Recordings of engines and peers."""
CAPTURES = ROOT.parent / "shared" / "captures"
"""Recordings that are too large for the repository; tests that need one skip where it is absent."""
CHAT_TEMPLATES = ROOT.parent / "shared" / "chat_templates"
"""Models' own templates, under their licences, and chats to render; likewise."""
