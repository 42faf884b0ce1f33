"""Makes the manual's pages fit for a site: MkDocs calls these functions, `make docs` builds the site.

Pages link to files of the repository, as a reader of the repository needs them. On the site these files are
under source/, Markdown as pages, code as text. Blocks that start several processes say so above the block.
Three pages are longer on the site than in the repository: error messages, tests with Megatron, and
predictions row by row.
"""

from __future__ import annotations

import functools
import os
import posixpath
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from messages import with_messages
from proofs import with_tests

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
CELL = re.compile(r"<td.*?</td>", re.DOTALL)
STARTED = re.compile(r"^```python torchrun=(\d+)$", re.MULTILINE)
SHOWN = {".md", ".png", ".svg", ".json"}
"""Endings of files that a browser shows, or MkDocs renders; others get .txt behind them."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add each file outside docs/ that a page links to, and each file that such a file links to."""
    from mkdocs.structure.files import File

    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    added = set()
    while pages:
        for path in _links(pages.pop()):
            if path.startswith("docs/") or path in added:
                continue
            added.add(path)
            target = ROOT / path
            if target.is_dir():
                names = "".join(f"{name}\n" for name in sorted(child.name for child in target.iterdir()))
                files.append(File.generated(config, _place(path), content=names))
            else:
                files.append(File.generated(config, _place(path), abs_src_path=str(target)))
            if path.endswith(".md"):
                pages.append(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page as the site has it, with links to places on the site."""
    here = page.file.src_uri
    markdown = _on_site(here, markdown)
    path = here.removeprefix("source/") if here.startswith("source/") else f"docs/{here}"

    def moved(link: re.Match[str]) -> str:
        target = _target(path, link[1])
        return posixpath.relpath(_place(target), posixpath.dirname(here)) if target else link[1]

    return STARTED.sub(r'```python title="torchrun --nproc-per-node \1"', LINK.sub(moved, markdown))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with bars in the code of tables: Markdown escapes them, which code shows as it is."""
    return CELL.sub(lambda cell: cell[0].replace("\\|", "|"), html)


def _on_site(page: str, markdown: str) -> str:
    """Return a page of docs/ with the sections that are on the site alone."""
    if page == "reference/messages.md":
        return with_messages(markdown)
    if page == "evidence/megatron-tests.md":
        return with_tests(markdown)
    return markdown + _predictions() if page == "evidence/predictions.md" else markdown


@functools.cache
def _predictions() -> str:
    """Return the sections of all rows, from the environment that has the packages: this one has not."""
    command = [ROOT / ".venv/bin/python", "docs/scripts/predictions.py"]
    environment = {**os.environ, "PYTHONPATH": "."}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return f"\n{done.stdout}"


def _links(path: str) -> Iterator[str]:
    """Yield the files and folders of the repository to which a page links."""
    for link in LINK.findall((ROOT / path).read_text()):
        if target := _target(path, link):
            yield target


def _target(path: str, link: str) -> str | None:
    """Return the path in the repository that a link of a page means, if there is such a file or folder."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    return target if not target.startswith("..") and (ROOT / target).exists() else None


def _place(path: str) -> str:
    """Return where the site has a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    shown = Path(path).suffix in SHOWN
    return f"source/{path}" if shown else f"source/{path}.txt"
