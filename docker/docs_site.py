"""Build the documents as a site with search: `python docker/docs_site.py FOLDER`. A dead link is an error.

Every Markdown file of the repository is a page, under its own path. Files that a page links to come with it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\(([^)\s#]+)")
TEMPLATES = "t2g/report/"  # Markdown with placeholders
CONFIG = """
site_name: t2g
theme:
  name: material
  font: false  # the site loads nothing from elsewhere
  palette:
    - {media: "(prefers-color-scheme: light)", scheme: default}
    - {media: "(prefers-color-scheme: dark)", scheme: slate}
  features: [navigation.indexes, search.suggest, content.code.copy]
plugins: [search]
markdown_extensions:
  - tables
  - pymdownx.superfences:
      custom_fences: [{name: mermaid, class: mermaid, format: !!python/name:pymdownx.superfences.fence_code_format }]
  - toc: {permalink: true, slugify: !!python/object/apply:pymdownx.slugs.slugify {kwds: {case: lower}}}
validation: {links: {not_found: warn, anchors: warn, absolute_links: warn, unrecognized_links: warn}}
"""


def list_pages() -> list[str]:
    """Return the paths of the Markdown files."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if not name.startswith(TEMPLATES)]


def copy_pages(pages: list[str], target: Path, root: Path = ROOT) -> None:
    """Copy the pages, and the files that they link to, under the same paths."""
    for name in pages:
        page = root / name
        text = page.read_text(encoding="utf-8")
        files = [page]
        for link in LINK.findall(text):
            linked = (page.parent / link).resolve()
            if "://" not in link and linked.is_file() and linked.suffix != ".md":
                files.append(linked)
        for file in files:
            copy = target / file.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)


def build(folder: Path, pages: list[str], root: Path = ROOT) -> int:
    """Build the site of `pages` into `folder`; return the exit code of mkdocs, which prints each dead link."""
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary)
        copy_pages(pages, source / "pages", root)
        config = f"docs_dir: pages\nsite_dir: {folder.resolve()}\n{CONFIG}"
        (source / "mkdocs.yml").write_text(config, encoding="utf-8")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(source / "mkdocs.yml")]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docker/docs_site.py FOLDER")
    sys.exit(build(Path(sys.argv[1]), list_pages()))
