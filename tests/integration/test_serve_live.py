"""jobs.serve with vLLM's own server: a command asks the policy, an answer comes, and no process or port is left."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from heads import free_port
from models import random_model

pytestmark = pytest.mark.slow  # an engine of its own; tests/jobs/test_serve.py has a stand-in

ROOT = Path(__file__).parents[2]
HARNESS = """
import json, sys, urllib.request
url, model, tokenizer = sys.argv[1:]
assert json.load(open(tokenizer + "/tokenizer_config.json"))
asked = {"model": model, "messages": [{"role": "user", "content": "Say it."}], "max_tokens": 5, "temperature": 0}
kind = {"Content-Type": "application/json"}
sent = urllib.request.Request(url + "/chat/completions", json.dumps(asked).encode(), kind)
said = json.load(urllib.request.urlopen(sent, timeout=120))
sys.exit(40 + said["usage"]["completion_tokens"])
"""


def test_a_command_asks_the_policy(tmp_path: Path) -> None:
    model = random_model(tmp_path / "model")
    (tmp_path / "harness.py").write_text(HARNESS)
    port = free_port()
    config = {
        "run": {"root": str(tmp_path), "name": "served"},
        "model": {"policy": str(model)},
        "engine": {"max_model_len": 512, "kv_cache_gib": 0.1},
        "serve": {"port": port, "command": f"{sys.executable} {tmp_path}/harness.py {{url}} {{model}} {{tokenizer}}"},
    }
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "jobs.serve", "--config", str(tmp_path / "serve.yaml")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in range(41, 46), done.stderr + (tmp_path / "served" / "server.log").read_text()[-2000:]
    assert f"policy answers at http://127.0.0.1:{port}/v1" in done.stdout
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(model) in (p.info["cmdline"] or [])]
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=5):
        pass
