"""Which files a name stands for: their bytes decide, and nothing else."""

import os
import sys
from pathlib import Path

import pytest

from t2g.runs.contents import content_hash, format_model_label, model_version, source_hash


def write(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 10**9))
    return path


def test_a_file_is_its_bytes(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", "x")
    other = write(tmp_path / ".b.csv", "x")
    assert content_hash(one) == content_hash(other) != ""
    write(one, "y")
    assert content_hash(one) != content_hash(other)
    assert content_hash(tmp_path / "none") == ""


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("model-1.safetensors", True),
        ("config.json", True),
        ("chat_template.jinja", True),
        ("tokenizer.model", True),
        ("span_reward.json", True),
        ("identity.json", False),
        ("sft.json", False),
        ("README.md", False),
        ("pytorch_model.bin", False),
        ("checkpoint-5/config.json", False),
        (".cache/config.json", False),
    ],
)
def test_a_model_is_what_is_loaded_of_its_folder(tmp_path: Path, file: str, counts: bool) -> None:
    write(tmp_path / "model-0.safetensors", "w")
    before = content_hash(tmp_path)
    write(tmp_path / file, "x")
    assert (content_hash(tmp_path) != before) is counts


def test_a_model_is_its_folder_or_its_name_and_revision_on_a_hub(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", "w")
    assert model_version(str(tmp_path), None) == model_version(str(tmp_path), "c1") == content_hash(tmp_path)
    assert model_version("owner/name", "c1") == "owner/name@c1"
    assert model_version("owner/name", None) == "owner/name@unpinned"


def test_the_versioned_name_of_a_model_changes_with_its_weights(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    write(weights, "w")
    before = format_model_label(str(tmp_path), None)
    write(weights, "v")
    after = format_model_label(str(tmp_path), None)
    assert after == f"{tmp_path}@{content_hash(tmp_path)}" != before
    assert format_model_label("owner/name", "c1") == "owner/name@c1"
    assert format_model_label("owner/name", None) == "owner/name@unpinned"


def test_a_folder_of_data_is_all_its_files_by_name(tmp_path: Path) -> None:
    write(tmp_path / "a" / "train" / "0.arrow", "x")
    write(tmp_path / "b" / "train" / "0.arrow", "x")
    assert content_hash(tmp_path / "a") == content_hash(tmp_path / "b")
    (tmp_path / "b" / "train" / "0.arrow").rename(tmp_path / "b" / "train" / "1.arrow")
    assert content_hash(tmp_path / "a") != content_hash(tmp_path / "b")
    write(tmp_path / "c" / ".cache" / "x", "x")
    assert content_hash(tmp_path / "c") == ""


@pytest.mark.parametrize("is_namespace", [False, True])
def test_a_function_is_its_file_and_every_file_of_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_namespace: bool
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = f"pkg_of_{tmp_path.name}"
    function = "def judge(prompt, response): ...\n"
    write(tmp_path / f"{package}_alone.py", f"from {package}.inner.my_feedback import judge\n")
    write(tmp_path / package / "inner" / "my_feedback.py", function)
    if not is_namespace:
        write(tmp_path / package / "__init__.py", "")
    names = f"{package}.inner.my_feedback:judge", f"{package}_alone:judge"
    before = [source_hash(name) for name in names]
    assert all(before) and len(set(before)) == 2

    helper = write(tmp_path / package / "helpers" / "words.py", "WORDS = 1\n")
    with_helper = [source_hash(name) for name in names]
    assert not set(with_helper) & set(before), "a helper decides as well, also behind a name that is imported elsewhere"
    write(tmp_path / package / "helpers" / "words.txt", "no source")
    write(tmp_path / package / ".ipynb_checkpoints" / "words.py", "no part of it")
    write(tmp_path / "beside.py", "no part of it")
    assert [source_hash(name) for name in names] == with_helper
    helper.unlink()
    assert [source_hash(name) for name in names] == before


@pytest.mark.parametrize(
    "name", ["t2g.tasks.tiny.task:feedback_function", "time:sleep", "no_such_module:judge", "json:none"]
)
def test_what_has_no_source_of_a_users_own_has_no_hash(name: str) -> None:
    assert source_hash(name) == ""


def test_a_module_that_cannot_be_imported_has_no_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for error in ("RuntimeError('no')", "SystemExit(1)"):
        write(tmp_path / "broken_function.py", f"raise {error}\n")
        assert source_hash("broken_function:judge") == ""
    assert "broken_function" not in sys.modules
    assert source_hash("json:dumps") != ""


@pytest.mark.parametrize("file", ["sft.json", "identity.json", "linked/0.arrow"])
def test_each_file_of_a_data_folder_counts_and_a_link_in_a_circle_ends(tmp_path: Path, file: str) -> None:
    data = tmp_path / "data"
    elsewhere = tmp_path / "elsewhere"
    write(data / "0.arrow", "x")
    elsewhere.mkdir()
    (data / "linked").symlink_to(elsewhere)
    (data / "circle").symlink_to(data)
    write(data / file, "before")
    before = content_hash(data)
    write(data / file, "after")
    assert content_hash(data) != before
