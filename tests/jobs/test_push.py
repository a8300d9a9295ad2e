"""t2g export and t2g push: what others get of a trained model, through a hub on this machine."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_hub import TOKEN, FakeHub, Repository, fake_hub
from models import random_model

from jobs import export_model, push
from jobs.common.hub import check_encryption
from jobs.common.published_model import write_published
from t2g.config import SFTJob, loading
from t2g.errors import UserError
from t2g.report.model_card import write_model_card

CARD_LINE = "Its output was not evaluated"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with fake_hub() as server:
        yield server


def logits(folder: Path, adapter: Path | None = None) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model(**tokenizer("It always hums.", return_tensors="pt")).logits


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of supervised training with LoRA: its model is merged, and its folder has the adapter, too."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("runs") / "own"
    base = random_model(folder.parent / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(folder / "model" / "adapter")
    merged = adapted.merge_and_unload()
    merged.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(base).save_pretrained(folder / "model")
    (folder / "model" / "identity.json").write_text("{}")
    config = SFTJob.model_validate({"model": {"policy": str(base)}, "data": {"path": "x.jsonl"}})
    loading.write(config, folder)
    write_model_card(folder / "model", config)
    return folder


def call(program: Any, *words: object) -> int:
    return program.main([str(word) for word in words])


def texts(repository: Repository) -> str:
    """Return all that can be read in a repository."""
    return "\n".join(content.decode() for path, content in repository.files.items() if not path.endswith("safetensors"))


def test_a_policy_is_pushed_whole_in_one_commit_and_is_private(run: Path, hub: FakeHub, tmp_path: Path) -> None:
    assert call(push, run, "ann/own", "--hub-url", hub.url) == 0
    repository = hub.repositories["ann/own"]
    assert (repository.private, repository.num_commits) == (True, 1)
    local = {file.name for file in (run / "model").iterdir() if file.is_file()} - {"identity.json"}
    assert repository.files.keys() == local
    assert hub.objects, "weights go through LFS"
    assert torch.equal(logits(repository.write(tmp_path / "clone")), logits(run / "model"))
    assert CARD_LINE in repository.files["README.md"].decode()
    assert str(run.parent) not in texts(repository), "no folder of this machine"


def test_weights_in_another_format_are_not_left_out_silently(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "binary"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match="has no weights in safetensors"):
        write_published(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_is_pushed_with_the_name_of_its_base(run: Path, hub: FakeHub, tmp_path: Path) -> None:
    assert call(push, run, "ann/own", "--adapter", "--base", "ann/base", "--hub-url", hub.url) == 0
    repository = hub.repositories["ann/own"]
    assert repository.files.keys() == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert json.loads(repository.files["adapter_config.json"])["base_model_name_or_path"] == "ann/base"
    card = repository.files["README.md"].decode()
    assert 'base_model: "ann/base"' in card and "library_name: peft" in card and CARD_LINE in card
    assert str(run.parent) not in texts(repository)
    clone = repository.write(tmp_path / "clone")
    torch.testing.assert_close(logits(run.parent / "base", clone), logits(run / "model"))


def test_a_push_deletes_the_files_of_the_last_one_and_no_file_of_others(run: Path, hub: FakeHub) -> None:
    assert call(push, run, "ann/own", "--adapter", "--base", "ann/base", "--hub-url", hub.url) == 0
    repository = hub.repositories["ann/own"]
    by_hand = {".gitattributes": b"*.safetensors lfs", "adapter.json": b"{}", "notes/results.json": b"{}"}
    repository.files.update(by_hand)
    shard = "model-00002-of-00002.safetensors"
    repository.files[shard] = b"weights"
    title = repository.titles["adapter_config.json"]
    repository.titles[shard] = f"{title} (part 2)"
    repository.titles[".gitattributes"] = title  # the hub adds patterns to it in a commit of ours
    repository.titles["adapter.json"] = f"{title}, corrected"
    assert call(push, run, "ann/own", "--hub-url", hub.url) == 0
    merged = {file.name for file in (run / "model").iterdir() if file.is_file()} - {"identity.json"}
    assert repository.files.keys() == merged | by_hand.keys()
    assert repository.num_commits == 2
    adapter = {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    repository.titles["config.json"] = "Correct the config"
    assert call(push, run, "ann/own", "--adapter", "--base", "ann/base", "--hub-url", hub.url) == 0
    assert repository.files.keys() == adapter | by_hand.keys() | {"config.json"}
    assert repository.num_commits == 3


def test_a_public_repository_needs_the_word(run: Path, hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repositories["ann/seen"] = Repository(private=False)
    assert call(push, run, "ann/seen", "--hub-url", hub.url) == 2
    assert "ann/seen is public: give --public" in capsys.readouterr().err
    assert hub.repositories["ann/seen"].files == {}
    assert call(push, run, "ann/seen", "--public", "--hub-url", hub.url) == 0
    assert "model.safetensors" in hub.repositories["ann/seen"].files
    assert call(push, run, "ann/new", "--public", "--hub-url", hub.url) == 0
    assert hub.repositories["ann/new"].private is False
    hub.repositories["ann/hidden"] = Repository(private=True)
    assert call(push, run, "ann/hidden", "--public", "--hub-url", hub.url) == 2
    assert "ann/hidden is private: leave out --public" in capsys.readouterr().err
    assert hub.repositories["ann/hidden"].files == {}


def test_a_base_that_only_another_machine_has_is_not_published(
    run: Path, hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(run / "model" / "adapter", adapter)
    file = adapter / "adapter_config.json"
    values = json.loads(file.read_text()) | {"base_model_name_or_path": "/data/secret/llama"}
    file.write_text(json.dumps(values))
    assert call(push, adapter, "ann/own", "--adapter", "--hub-url", hub.url) == 2
    assert "which is on no hub; give --base" in capsys.readouterr().err
    assert hub.requests == []


def test_a_dry_run_sends_nothing_and_needs_no_token(
    run: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    assert call(push, run, "ann/own", "--hub-url", hub.url, "--dry-run") == 0
    assert hub.requests == []
    output = capsys.readouterr().out
    assert "ann/own: private" in output and "model.safetensors" in output and "nothing was sent" in output


@pytest.mark.parametrize("fail_at", ["/create", "/preupload", "/lfs/", "/commit"])
def test_a_push_that_fails_leaves_nothing_and_shows_no_token(
    run: Path, hub: FakeHub, fail_at: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.fail_at = fail_at
    assert call(push, run, "ann/own", "--hub-url", hub.url) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") >= 1 and TOKEN not in captured.out + captured.err
    assert all(not repository.files for repository in hub.repositories.values())
    hub.fail_at = ""
    assert call(push, run, "ann/own", "--hub-url", hub.url) == 0, "the same command goes on"


def test_what_cannot_be_pushed_is_a_sentence(
    run: Path, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*words: object) -> str:
        assert call(push, *words, "--hub-url", hub.url) == 2
        return capsys.readouterr().err

    assert "needs OWNER/NAME" in error(run, "own")
    assert "it is no run, model or adapter" in error(tmp_path, "ann/own")
    assert "which is on no hub; give --base" in error(run, "ann/own", "--adapter")
    assert "needs OWNER/NAME" in error(run, "ann/own", "--adapter", "--base", "/data/llama")
    assert "give --adapter as well" in error(run, "ann/own", "--base", "ann/base")
    assert "it has no adapter" in error(run.parent / "base", "ann/own", "--adapter")
    assert hub.requests == []
    monkeypatch.setenv("HF_TOKEN", "hf_wrongwrongwrongwrongwrong")
    refused = error(run, "ann/own")
    assert "refuses the token (401)" in refused and "hf_wrong" not in refused


@pytest.mark.parametrize("url", ["http://hub.invalid", "HTTP://10.0.0.9:80/", "http://127.0.0.1.hub.invalid"])
def test_a_token_is_not_sent_to_another_machine_unencrypted(
    run: Path, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert call(push, run, "ann/own", "--hub-url", url) == 2
    error = capsys.readouterr().err
    assert "would receive the token unencrypted" in error and TOKEN not in error


@pytest.mark.parametrize("url", ["https://hub.invalid", "http://localhost:1", "http://127.0.0.1:1", "http://[::1]:1"])
def test_a_token_may_be_sent_encrypted_or_to_this_machine(url: str) -> None:
    check_encryption(url)


def test_a_hub_that_is_not_there_and_a_missing_token_are_sentences(run: Path, tmp_path: Path) -> None:
    def error(**environ: str) -> str:
        plain = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "HF_HOME")}
        command = [sys.executable, "-m", "jobs.push", str(run), "ann/own", "--hub-url", "http://127.0.0.1:9"]
        done = subprocess.run(
            command, env=plain | {"HF_HOME": str(tmp_path)} | environ, capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        return done.stderr

    assert "set HF_TOKEN" in error()
    assert "the hub at http://127.0.0.1:9 cannot be used" in error(HF_TOKEN=TOKEN)


def test_an_adapter_is_exported_merged_into_its_base_and_alone(run: Path, tmp_path: Path) -> None:
    adapter = run / "model" / "adapter"
    assert call(export_model, adapter, tmp_path / "merged") == 0
    torch.testing.assert_close(logits(tmp_path / "merged"), logits(run / "model"))
    assert str(run.parent) not in (tmp_path / "merged" / "config.json").read_text()
    assert "library_name: peft" not in (tmp_path / "merged" / "README.md").read_text()
    assert call(export_model, run, tmp_path / "alone", "--adapter") == 0
    assert {file.name for file in (tmp_path / "alone").iterdir()} == {
        "README.md", "adapter_config.json", "adapter_model.safetensors",
    }  # fmt: skip
    torch.testing.assert_close(logits(run.parent / "base", tmp_path / "alone"), logits(run / "model"))


def test_a_full_folder_is_left_alone_and_an_interrupted_export_is_made_again(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    assert call(export_model, run, tmp_path / "mine") == 2
    assert "is not an empty folder" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["notes"]
    assert call(export_model, run, Path()) == 2
    assert "is the current folder" in capsys.readouterr().err
    (tmp_path / "own.part").mkdir()
    (tmp_path / "own.part" / "half.safetensors").write_text("half")
    assert call(export_model, run, tmp_path / "own") == 0
    assert not (tmp_path / "own" / "half.safetensors").exists() and not (tmp_path / "own.part").exists()
