"""What a rank of two holds while it loads and parts a model of 55 million weights, 209 MiB in float32."""

import threading
import time
from pathlib import Path

import pytest
import torch
from heads import free_port
from models import byte_llama
from transformers import LlamaConfig, LlamaForCausalLM

from actors.learner import zero3
from actors.learner.spec import LearnerSpec
from actors.learner.trainers import load_policy
from t2g.config import LearnerConfig, ModelConfig

MIB = 2**20


def held() -> int:
    """Bytes of memory of this process's own: pages of files, which the system may drop, are not in it."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return 1024 * int(line.split()[1])


def rank_main(rank: int, port: int, model: str, out: str) -> None:
    torch.set_num_threads(1)
    zero3.init_distributed(rank, 2, "127.0.0.1", port, "gloo", timeout_s=60)
    spec = LearnerSpec(
        model=ModelConfig(policy=model), learner=LearnerConfig(workers=2), loss="supervised", num_updates=1, seed=1
    )
    start = held()
    seen = [0]
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(held())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    policy, _, _ = load_policy(spec, on_gpu=False)
    engine = zero3.build_engine(policy, None, dtype="float32", world_size=2)
    done.set()
    watcher.join()
    with torch.no_grad():
        logits = engine(input_ids=torch.arange(32)[None]).logits
    torch.save({"peak": max(seen) - start, "logits": logits}, f"{out}/{rank}.pt")


@pytest.mark.slow  # two processes that load DeepSpeed
def test_a_rank_never_holds_the_whole_model(tmp_path: Path) -> None:
    """Half of it is the rank's share; a rank that took rank 0's weights into pages of its file came to 1.55 of it."""
    byte_llama(tmp_path, seed=1)  # for its tokenizer
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=512, intermediate_size=1792, num_hidden_layers=16, num_attention_heads=8,
        num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    whole = 4 * sum(p.numel() for p in model.parameters())
    assert whole > 200 * MIB
    torch.multiprocessing.spawn(rank_main, (free_port(), str(tmp_path), str(tmp_path)), nprocs=2)
    with torch.no_grad():
        expected = model(input_ids=torch.arange(32)[None]).logits
    for rank in range(2):
        measured = torch.load(tmp_path / f"{rank}.pt")
        assert measured["peak"] < 0.95 * whole
        torch.testing.assert_close(measured["logits"], expected, rtol=1e-4, atol=1e-5)
