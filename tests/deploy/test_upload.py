import os
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2g.deploy.submission import (
    EXCLUDED,
    MAX_BYTES,
    SECRETS,
    Upload,
    describe_left_out,
    files_to_upload,
    refuse_large,
    select_files,
    write_package,
)
from t2g.errors import UserError

REPOSITORY = Path(__file__).parents[2]


def tree(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def sent(root: Path) -> list[str]:
    return [file.as_posix() for file in files_to_upload(root)]


def test_code_and_configs_go_and_runs_caches_secrets_and_environments_stay(tmp_path: Path) -> None:
    tree(tmp_path, "jobs/a.py", "configs/own/policy.yaml", "README.md", "t2g/runs/table.py", "t2g/build/b.py")
    tree(
        tmp_path, "runs/own/metrics.jsonl", ".git/HEAD", ".venv/bin/python", "jobs/__pycache__/a.pyc", "build/lib.so",
        "t2g.egg-info/PKG-INFO", ".env", ".env.local", "t2g/.pytest_cache/x", "jobs/a.pyc", ".hypothesis/y",
        ".ray/auth_token", "ca.pem", "configs/own/tls.key", "id_rsa", "jobs/id_ed25519.pub", "credentials.json",
        "t2g/credentials", ".aws/credentials", ".ssh/known_hosts", ".envrc", "configs/Prod.env", ".git-credentials",
        ".pypirc", ".npmrc", ".kube/config", ".docker/config.json", ".cache/huggingface/token", ".config/gcloud/db",
        "my-Credentials.yaml", "configs/client_secret.json", "service-account-prod.json", "a.P12", "b.pfx",
        "kubeconfig-prod.yaml", "secrets/password.txt",
    )  # fmt: skip
    assert sent(tmp_path) == [
        "README.md", "configs/own/policy.yaml", "jobs/a.py", "t2g/build/b.py", "t2g/runs/table.py",
    ]  # fmt: skip


def test_code_with_the_name_of_a_secret_goes(tmp_path: Path) -> None:
    tree(tmp_path, "t2g/config/secrets.py", "credentials.py", "secrets/vault.py", "tokenizer.json", "keys.yaml")
    assert sent(tmp_path) == [
        "credentials.py", "keys.yaml", "secrets/vault.py", "t2g/config/secrets.py", "tokenizer.json",
    ]  # fmt: skip


def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    tree(tmp_path, "jobs/a.py", "configs/secretary.yaml", ".envrc")
    outside = tmp_path.parent / "shared.py"
    outside.touch()
    (tmp_path / "judge.py").symlink_to(outside)
    upload = select_files(tmp_path)
    assert upload.left_out == [Path("configs/secretary.yaml"), Path("judge.py")]
    assert describe_left_out(upload).endswith(": configs/secretary.yaml, judge.py")
    assert describe_left_out(Upload(files=[], left_out=[])) == ""
    many = [Path(f"{number}.secret") for number in range(7)]
    assert describe_left_out(Upload(files=[], left_out=many)).endswith("4.secret and 2 more")


def test_secrets_stay_when_rays_own_upload_takes_the_folder(tmp_path: Path) -> None:
    """It heeds .rayignore alone."""
    ignored = set((REPOSITORY / ".rayignore").read_text().splitlines())
    assert ".?*" in ignored and ".?*" in EXCLUDED, "Ray applies .* to the folder itself"
    assert {"*.env", "*.pem", "*.key", "*.p12", "*.pfx", "id_rsa*", "kubeconfig*"} <= ignored & set(SECRETS)


def test_rayignore_is_heeded_as_git_would(tmp_path: Path) -> None:
    tree(
        tmp_path,
        "data/a.jsonl",
        "t2g/data/load.py",
        "notes.md",
        "t2g/notes.md",
        "big.bin",
        "t2g/x.bin",
        "docs",
        "t2g/docs/a",
    )
    (tmp_path / ".rayignore").write_text("# large\n/data\n*.bin\n\nt2g/notes.md\ndocs/\n")
    assert sent(tmp_path) == ["docs", "notes.md", "t2g/data/load.py"]


@pytest.mark.parametrize("line", ["!keep.md", "data/**/x"])
def test_what_is_not_understood_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    (tmp_path / ".rayignore").write_text(f"ok\n{line}\n")
    with pytest.raises(UserError, match=r"\.rayignore:2: got "):
        files_to_upload(tmp_path)


def test_links_to_folders_are_not_followed_and_broken_links_are_passed_over(tmp_path: Path) -> None:
    tree(tmp_path, "code/a.py", "elsewhere/secret")
    root = tmp_path / "code"
    (root / "loop").symlink_to(root)
    (root / "away").symlink_to(tmp_path / "elsewhere")
    (root / "broken").symlink_to(tmp_path / "nothing")
    assert sent(root) == ["a.py"]


def test_a_link_to_a_file_that_is_not_uploaded_is_left_out(tmp_path: Path) -> None:
    tree(tmp_path, "code/a.py", "code/.env", "elsewhere/secret.txt")
    root = tmp_path / "code"
    (root / "b.py").symlink_to("a.py")
    (root / "notes.txt").symlink_to(tmp_path / "elsewhere/secret.txt")
    (root / "settings.txt").symlink_to(root / ".env")
    assert sent(root) == ["a.py", "b.py"]


def test_a_large_upload_is_refused_and_the_largest_files_are_named(tmp_path: Path) -> None:
    for i in range(7):
        with (tmp_path / f"{i}.bin").open("wb") as file:
            os.truncate(file.fileno(), (i + 5) * 2**20)  # 5 + 6 + .. + 11 MiB = 56
    with pytest.raises(UserError) as refused:
        refuse_large(tmp_path, files_to_upload(tmp_path))
    sentence = str(refused.value)
    assert sentence.startswith("the upload has 56.0 MiB, and at most 50 MiB are sent; the largest files: ")
    assert "6.bin (11.0 MiB), 5.bin (10.0 MiB), 4.bin (9.0 MiB), 3.bin (8.0 MiB), 2.bin (7.0 MiB). List" in sentence


@given(extra=st.integers(0, 2))
def test_the_bound_itself_is_sent(tmp_path_factory: pytest.TempPathFactory, extra: int) -> None:
    root = tmp_path_factory.mktemp("upload")
    with (root / "a").open("wb") as file:
        os.truncate(file.fileno(), MAX_BYTES - 1 + extra)
    if extra <= 1:
        refuse_large(root, [Path("a")])
    else:
        with pytest.raises(UserError):
            refuse_large(root, [Path("a")])


def test_equal_files_make_equal_packages_whatever_their_age(tmp_path: Path) -> None:
    packages = []
    for age in (0, 10**6):
        root = tmp_path / str(age)
        tree(root, "jobs/a.py", "run.sh")
        (root / "run.sh").chmod(0o755)
        os.utime(root / "jobs/a.py", (age, age))
        packages.append(tmp_path / f"{age}.zip")
        write_package(root, files_to_upload(root), packages[-1])
    assert packages[0].read_bytes() == packages[1].read_bytes()
    with zipfile.ZipFile(packages[0]) as package:
        assert {e.filename: oct(e.external_attr >> 16) for e in package.infolist()} == {
            "jobs/a.py": oct((tmp_path / "0/jobs/a.py").stat().st_mode & 0o777), "run.sh": "0o755",
        }  # fmt: skip
        assert package.read("jobs/a.py") == b"jobs/a.py"


def test_this_repository_is_small_enough_and_complete() -> None:
    files = files_to_upload(REPOSITORY)
    refuse_large(REPOSITORY, files)
    names = {file.as_posix() for file in files}
    assert {"jobs/train_policy/__main__.py", "actors/engines/rollout.py", "t2g/loop/trainer.py"} <= names
    assert "t2g/config/secrets.py" in names
    assert "configs/tiny/policy.yaml" in names
    assert not any(name.startswith((".git/", ".venv/", "runs/")) for name in names)
