"""Serve a policy behind an OpenAI-compatible API, for other people's harnesses.

    t2g serve runs/my-run                                # the policy of a run
    python -m jobs.serve --config configs/own/serve.yaml model.policy=runs/own/policy
    python -m jobs.serve --config configs/own/serve.yaml model.policy=runs/own/policy \
        serve.command="python my_harness.py {url} {model} {tokenizer}"

t2g/guides/15-measure-and-compare.md has the command for lm-eval.

Without serve.command it stays until Ctrl-C or SIGTERM. With it the server ends with the command, however that ends, and
the command's exit code is the job's. What the server says stands in server.log of the run folder.
"""

import shlex
import sys
import time
from contextlib import ExitStack

from jobs.common.cli import install_stop_flag, main
from t2g.config import ServeJob, loading
from t2g.config.run_values import serving_values
from t2g.errors import RunStopped, Stopped, UserError


def expand_command(template: str, *, url: str, model: str, tokenizer: str) -> list[str]:
    """Return the arguments of serve.command, with its placeholders replaced.

    >>> expand_command("ask {url} --as '{model} 1'", url="http://h/v1", model="policy", tokenizer="runs/policy")
    ['ask', 'http://h/v1', '--as', 'policy 1']
    """
    arguments = shlex.split(template)
    for place, value in (("{url}", url), ("{model}", model), ("{tokenizer}", tokenizer)):
        arguments = [argument.replace(place, value) for argument in arguments]
    return arguments


def run(config: ServeJob) -> int:
    from actors.engines.server import POLL_S, run_process, run_server
    from jobs.common.run_folder import sole_process
    from t2g.runs.progress import log_duration

    stop = install_stop_flag(saves_work=False)
    folder = config.run.folder
    template = config.serve.command
    with sole_process(folder), ExitStack() as started:
        loading.write(config, folder)
        log = folder / "server.log"
        with log_duration("starting the server"):
            server, url = started.enter_context(run_server(config, log, lambda: bool(stop)))
        print(f"{config.serve.name} answers at {url}", flush=True)
        harness = None
        if template is not None:
            arguments = expand_command(template, url=url, model=config.serve.name, tokenizer=config.model.policy)
            try:
                harness = started.enter_context(run_process(arguments))
            except OSError as error:
                raise UserError(f"serve.command: {arguments[0]} cannot be started: {error.strerror}") from error
        while server.poll() is None and not stop:
            if harness is not None and (code := harness.poll()) is not None:
                return code if code >= 0 else 128 - code
            time.sleep(POLL_S)
    if stop:
        raise Stopped
    raise RunStopped(f"the server ended by itself with {server.returncode}; see {log}")


if __name__ == "__main__":
    sys.exit(main(ServeJob, run, of_run=serving_values))
