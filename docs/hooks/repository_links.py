"""Holds links to files of the repository to the files that are there: a dead one is a warning."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

LOG = logging.getLogger("mkdocs.hooks.repository_links")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Warn of each link to `blob/main/PATH` or `tree/main/PATH` whose PATH does not exist."""
    link = re.compile(
        re.escape(str(config.repo_url).rstrip("/")) + r"/(?:blob|tree)/main/([^)\s#>]+)"
    )
    root = Path(config.config_file_path).parent
    for match in link.finditer(markdown):
        if not (root / match[1]).exists():
            LOG.warning(
                "%s links to %s, which is not in the repository", page.file.src_uri, match[1]
            )
    return markdown
