"""Control characters and credentials in text.

`text_problems` refuses both in a config. `mask_secrets` masks credentials in other text: the command line, a server's
error. Text without spaces after a known prefix counts as a key. So does the value of a secret environment variable.
"""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

# Control characters, line and paragraph separators, characters that turn the direction of writing, lone surrogates.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
SECRET_NAME = re.compile(r"TOKEN(?!IZ)|SECRET|PASSW|CREDENTIAL|(^|_)KEY")  # name of an environment variable
MIN_SECRET_CHARS = 12  # shorter values of such variables, such as "EMPTY", occur in ordinary text
_FILE_PATH = re.compile(r"/[\w./-]*\.[A-Za-z]\w{0,9}")  # the file may be on another machine
# Bounded repetitions: a server's answer of megabytes is searched in linear time.
_SECRET = re.compile(
    r"(?<![\w.-])sk-(?=[\w-]{0,99}\d)[\w-]{8,999}"
    r"|(?<![\w.-])(?:hf_|gsk_|xai-|gh[a-z]_|github_pat_|glpat-|AIza|AKIA|eyJ)[A-Za-z0-9]{16,999}[\w.-]{0,999}"
    r"|(?<=://)(?:[^/\s@]{1,256}|[^/\s:@]{1,99}:[^\s@]{1,256})(?=@)"  # user and password of a URL
    r"|(?<=[Bb]earer )[^\s\"']{1,999}"
    r"|(?i:\bauthorization[\"']?\s{0,3}[:=]\s{0,3}[\"']?basic\s{1,3}[^\s\"']{1,999})"
    r"|(?i:(?<=[?&])[\w.-]{0,40}(?:key|token|secret|sig|passw|auth)[\w.-]{0,40}=[^&#\s\"']{1,999})"
)


def mask_secrets(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the text with `***` in place of each credential.

    >>> mask_secrets("https://ann:pass@proxy/v1?api-key=1 llm.model=sk-proj-12345678", {})
    'https://***@proxy/v1?*** llm.model=***'
    """
    for value in sorted(_secret_values(environ), key=len, reverse=True):  # one may be the start of another
        text = text.replace(value, "***")
    return _SECRET.sub("***", text)


def text_problems(values: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the keys and a sentence for each name or value of a config that it may not hold."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from text_problems([str(name), value], (*keys, str(name)))
    elif isinstance(values, list):
        for value in values:
            yield from text_problems(value, keys)
    elif isinstance(values, str):
        name = repr(mask_secrets(".".join(keys)))[1:-1]
        if CONTROL.search(values):
            yield keys, f"{name} holds a line break, a control or a bidirectional character; it needs one plain line"
        elif mask_secrets(values) != values:
            need = "export it as an environment variable, and give that variable's name where a config asks for it"
            yield keys, f"{name} holds a key or a password, which the run folder would keep; {need} (llm.key_env)"


def _secret_values(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the values of secret variables, and proxy passwords both URL-quoted and unquoted."""
    for name, value in environ.items():
        if name.upper().endswith("_PROXY"):
            password = value.rpartition("@")[0].partition("://")[2].partition(":")[2]
            yield from {password, unquote(password)} if len(password) >= MIN_SECRET_CHARS // 2 else ()
        elif SECRET_NAME.search(name.upper()) and len(value) >= MIN_SECRET_CHARS and not _is_path(value):
            yield value.strip()


def _is_path(value: str) -> bool:
    """Return whether a value is the path of a file with a secret, which messages name; keys in base64 have no dot."""
    return _FILE_PATH.fullmatch(value) is not None or (value.startswith("/") and os.path.exists(value))
