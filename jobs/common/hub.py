"""A client of the Hugging Face hub that creates a repository and pushes a folder. Each request has a deadline."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token, set_client_factory
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id
from huggingface_hub.utils._http import default_client_factory

from t2g.config.secrets import mask_secrets
from t2g.errors import UserError

TIMEOUT_S = 120.0  # limit for one connection, one answer, and one piece of a file
DENIED = (401, 403)
COMMIT_MESSAGE = "Push a model trained by t2g"
# Titles of commits whose files a later push may delete; huggingface_hub numbers the parts of a long upload.
OWN_COMMIT = re.compile(rf"{COMMIT_MESSAGE}( \(part \d+\))?")
OF_THE_HUB = (".gitattributes",)  # the hub itself may change it in a commit of ours
LOCAL = ("localhost", "127.0.0.1", "::1")
NO_TOKEN = "no token for the hub: set HF_TOKEN, or log in by `hf auth login`"


def check_repository(name: str) -> None:
    """Check the name of a repository. Raises UserError for another form than OWNER/NAME."""
    if not names_repository(name):
        raise UserError(f"repository: got {name!r}, needs OWNER/NAME of letters, digits and -_.")


def names_repository(name: str) -> bool:
    """Return whether a name has the form OWNER/NAME."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1


def check_encryption(url: str) -> None:
    """Check that a token can be sent to `url`. Raises UserError for http:// to another machine."""
    try:
        address = urlsplit(url)
    except ValueError as error:
        raise UserError(f"the hub's address is no URL ({error}); it needs the form https://HOST") from None
    if address.scheme == "http" and address.hostname not in LOCAL:
        raise UserError(f"the hub {address.hostname} would receive the token unencrypted: use https:// in its address")


class Hub:
    """The models of one hub."""

    def __init__(self, api: Any) -> None:
        """`api` is a HfApi."""
        self._api = api

    @classmethod
    def connect(cls, url: str | None) -> Self:
        """Return the hub at `url`, or if None that of HF_ENDPOINT, else huggingface.co.

        Raises:
            UserError: There is no token, or the hub would receive it unencrypted.
        """
        if not get_token():
            raise UserError(NO_TOKEN)
        set_client_factory(_make_client)
        if url is not None:
            constants.HF_HUB_DISABLE_XET = True  # its faster protocol is of huggingface.co
        api = HfApi(endpoint=url, library_name="t2g")
        check_encryption(api.endpoint)
        return cls(api)

    def push(self, folder: Path, repository: str, *, is_public: bool) -> str:
        """Create the repository unless it exists, and push the files in one commit; return the commit's address.

        The commit deletes files of an earlier push that `folder` does not have, unless others have changed them since.

        Raises:
            UserError: The hub does not answer or refuses, or the repository's visibility is not `is_public`.
        """
        with self._errors(repository):
            self._api.create_repo(repository, private=not is_public, exist_ok=True)
            info = self._api.model_info(repository)
            if not info.private and not is_public:
                raise UserError(f"{repository} is public: give --public, or name another repository")
            if info.private and is_public:
                raise UserError(f"{repository} is private: leave out --public, or make it public on the hub")
            files = sorted(folder.iterdir())
            additions = [CommitOperationAdd(file.name, file) for file in files]
            pushed = {file.name for file in files}
            stale = sorted(self._list_own_files(repository) - pushed)
            deletions = [CommitOperationDelete(name, is_folder=False) for name in stale]
            # `upload_folder` makes several commits if a push takes minutes.
            for name in stale:
                print(f"  {name}  deleted, of an earlier push")
            commit = self._api.create_commit(repository, [*deletions, *additions], commit_message=COMMIT_MESSAGE)
            return str(commit.commit_url)

    def _list_own_files(self, repository: str) -> set[str]:
        """Return the files whose last change is a push of this program."""
        names = set[str]()
        for entry in self._api.list_repo_tree(repository, expand=True):
            if not isinstance(entry, RepoFile) or entry.last_commit is None or entry.path in OF_THE_HUB:
                continue
            if OWN_COMMIT.fullmatch(entry.last_commit.title):
                names.add(entry.path)
        return names

    @contextmanager
    def _errors(self, repository: str) -> Iterator[None]:
        """Turn errors of the client into a sentence without credentials."""
        try:
            yield
        except UserError:
            raise
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status in DENIED:
                owner = repository.partition("/")[0]
                reason = f"the hub refuses the token ({status}): it must be allowed to write to {owner}"
                raise UserError(reason) from None
            raise UserError(f"the hub answers {status}: {_describe(error)}") from None
        except (httpx2.HTTPError, ConnectionError, ValueError, RuntimeError) as error:
            reason = _describe(error) or type(error).__name__
            raise UserError(f"the hub at {self._api.endpoint} cannot be used: {reason}") from None


def _describe(error: Exception) -> str:
    """Return the text of an error in one line without credentials; masked first: a secret may hold white space."""
    return " ".join(mask_secrets(str(error)).split())


def _make_client() -> httpx2.Client:
    """Return the client of huggingface_hub with a timeout; its own has none."""
    client = default_client_factory()
    client.timeout = httpx2.Timeout(TIMEOUT_S)
    return client
