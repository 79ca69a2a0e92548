"""A hook of mkdocs: pages of the site that are files outside of `docs/`, and links to such files.

README.md is the first page, CONTRIBUTING.md and CHANGELOG.md are pages. Another file of the repository to which a page
links is copied to `files/`. So the site is complete without the repository. Any other link is left as it is, for mkdocs
to refuse.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
"""Pages of the site by the file that they are."""
_LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
_IMAGE = re.compile(r'(<img src=")docs/')


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and files from outside of `docs/`."""
    for source, name in PAGES.items():
        files.append(File.generated(config, name, content=linked((ROOT / source).read_text(), ROOT)))
    for target in set(_outside()):
        files.append(File.generated(config, in_site(target), content=target.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Lead links of a page of `docs/` to where the site has the file."""
    return markdown if page.file.generated_by else linked(markdown, Path(page.file.abs_src_path).parent)


def _outside() -> Iterator[Path]:
    """Yield the files to which a page links and which are neither in `docs/` nor pages."""
    for document in [*DOCS.rglob("*.md"), *(ROOT / source for source in PAGES)]:
        for _, link, _ in _LINK.findall(document.read_text()):
            target = (document.parent / link).resolve()
            is_elsewhere = target.is_relative_to(ROOT) and not target.is_relative_to(DOCS)
            if is_elsewhere and target.is_file() and target.name not in PAGES:
                yield target


def in_site(target: Path) -> str:
    """Return where the site has a file of the repository; of a folder its README."""
    source = target.relative_to(ROOT).as_posix()
    if target.is_dir():
        source += "/README.md"
    if source in PAGES:
        return PAGES[source]
    return source.removeprefix("docs/") if target.is_relative_to(DOCS) else f"files/{source}"


def linked(markdown: str, folder: Path) -> str:
    """Return a page's text with links into the site; `folder` is that of the page's file."""
    at = folder.relative_to(DOCS) if folder.is_relative_to(DOCS) else Path()

    def rewritten(match: re.Match[str]) -> str:
        before, target, anchor = match.groups()
        path = (folder / target).resolve()
        if not path.is_relative_to(ROOT) or not path.exists():
            return match[0]
        return f"{before}{os.path.relpath(in_site(path), at)}{anchor or ''})"

    return _IMAGE.sub(r"\1", _LINK.sub(rewritten, markdown))
