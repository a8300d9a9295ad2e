"""The site of the documents: built strictly where its packages are, with each page under its path."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from docker_programs import load_program


@pytest.fixture(scope="module")
def docs_site() -> ModuleType:
    return load_program("docs_site")


def test_pages_come_with_the_files_that_they_link_to(docs_site: ModuleType, tmp_path: Path) -> None:
    pages = docs_site.list_pages()
    assert {"README.md", "t2g/guides/01-first-run.md", "configs/README.md"} <= set(pages)
    assert not any("model_card" in page for page in pages)
    docs_site.copy_pages(["README.md"], tmp_path)
    assert {"README.md", "t2g/guides/pipeline.svg"} <= {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}


@pytest.mark.slow
def test_the_site_builds_without_a_dead_link_and_a_dead_one_is_an_error(docs_site: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    command = [sys.executable, docs_site.__file__, str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "index.html").is_file()
    assert (tmp_path / "site" / "search" / "search_index.json").is_file()
    broken = tmp_path / "broken"
    broken.mkdir()
    for text in ("[a](none.md)", "[a](README.md#none)"):
        (broken / "README.md").write_text(f"# Title\n\n{text}\n")
        assert docs_site.build(tmp_path / "other", ["README.md"], broken) != 0, text
