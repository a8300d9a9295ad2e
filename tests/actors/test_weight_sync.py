"""Cutting weights into buckets, and when a sync may be believed."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.weight_sync import Bucket, ParamMeta, StoreWeightSync, module_key, plan_buckets, probe_gap, probe_ids
from t2g.errors import RunStopped
from t2g.sections import LearnerConfig


def meta(name: str, *shape: int) -> ParamMeta:
    return ParamMeta(name=name, shape=shape)


LLAMA = [
    meta("model.embed_tokens.weight", 10, 4),  # 40
    meta("model.layers.0.self_attn.q_proj.weight", 4, 4),
    meta("model.layers.0.self_attn.k_proj.weight", 2, 4),  # layer 0: 24
    meta("model.layers.1.self_attn.q_proj.weight", 4, 4),
    meta("model.layers.1.self_attn.k_proj.weight", 2, 4),  # layer 1: 24
    meta("model.norm.weight", 4),
]


def test_buckets_hold_whole_layers_up_to_their_size() -> None:
    # float32: embedding 160 bytes, a layer 96, the norm 16
    buckets = plan_buckets(LLAMA, dtype="float32", bucket_bytes=112)
    assert [[n.removeprefix("model.") for n in bucket] for bucket in buckets] == [
        ["embed_tokens.weight"],
        ["layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight"],
        ["layers.1.self_attn.q_proj.weight", "layers.1.self_attn.k_proj.weight", "norm.weight"],
    ]
    # bfloat16 halves them: 80 + 48 > 112, 48 + 48 + 8 = 104
    assert [len(b) for b in plan_buckets(LLAMA, dtype="bfloat16", bucket_bytes=112)] == [1, 5]
    assert [len(b) for b in plan_buckets(LLAMA, dtype="float32", bucket_bytes=1e9)] == [6]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from("abc"), st.integers(1, 64)), unique_by=lambda t: t[:2]),
    st.integers(1, 2000),
)
def test_every_name_is_sent_once_and_no_layer_is_split(rows: list[tuple[int, str, int]], bucket_bytes: int) -> None:
    metas = [meta(f"model.layers.{layer}.{part}.weight", size) for layer, part, size in rows]
    buckets = plan_buckets(metas, dtype="float32", bucket_bytes=bucket_bytes)
    assert sorted(n for b in buckets for n in b) == sorted(m.name for m in metas)
    homes = {}
    for index, bucket in enumerate(buckets):
        for name in bucket:
            assert homes.setdefault(module_key(name), index) == index
    sizes = {m.name: 4 * m.shape[0] for m in metas}
    for bucket in buckets:
        one_module = len({module_key(n) for n in bucket}) == 1
        assert one_module or sum(sizes[n] for n in bucket) <= bucket_bytes


def test_bias_and_weight_of_a_module_outside_the_layers_stay_together() -> None:
    assert module_key("lm_head.weight") == module_key("lm_head.bias") == "lm_head"
    assert module_key("transformer.h.11.attn.c_attn.bias") == "transformer.h.11"


def test_the_probe_is_fixed_and_lies_in_the_vocabulary() -> None:
    ids = probe_ids(300, 64)
    np.testing.assert_array_equal(ids, probe_ids(300, 64))
    assert ids.dtype == np.int32 and len(ids) == 64 and ids.min() >= 0 and ids.max() < 300
    assert len(set(ids.tolist())) > 40


def test_a_probe_with_nan_is_infinitely_far() -> None:
    assert probe_gap(np.float32([-1, -2]), np.float32([-1, -2.5])) == 0.5
    assert probe_gap(np.float32([-1, np.nan]), np.float32([-1, -2])) == float("inf")
    assert probe_gap(np.float32([-np.inf]), np.float32([-1])) == float("inf")


class Remote:
    """A worker method as Ray shows it, called at once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.remote = function


class FakeWorker:
    """Scores the probe by its weights; forgets one bucket for its first `deaf` syncs."""

    def __init__(self, deaf: int = 0) -> None:
        self.weight, self.deaf, self.log = 0.0, deaf, []
        self.open_update = Remote(lambda version, dtype, metas: self.log.append(("open", version, dtype, len(metas))))
        self.load_bucket = Remote(self._load)
        self.close_update = Remote(lambda version: self.log.append(("close", version)))
        self.score = Remote(lambda ids: np.full(len(ids) - 1, self.weight, np.float32))

    def _load(self, version: int, bucket: Bucket) -> int:
        self.log.append(("bucket", bucket.index))
        if self.deaf:
            self.deaf -= 1
        else:
            self.weight = float(bucket.tensors[0][0])
        return sum(t.nbytes for t in bucket.tensors)


class FakeFleet:
    vocab_size, dtype, max_model_len = 50, "float32", 32

    def __init__(self, **workers: FakeWorker) -> None:
        self.workers = workers

    def on_all(self, submit: Callable[[Any], Any], *, timeout_s: float, what: str) -> dict[str, Any]:
        assert timeout_s > 0
        return {name: submit(worker) for name, worker in self.workers.items()}


class FakeLearner:
    weight = -1.5

    def announce(self) -> list[ParamMeta]:
        return [meta("a.weight", 2)]

    def stream_weights(self, dtype: str) -> Iterator[Bucket]:
        yield Bucket(index=0, names=("a.weight",), tensors=(np.full(2, self.weight, np.float32),))

    def probe_logprobs(self, ids: np.ndarray) -> np.ndarray:
        assert len(ids) == 31  # 64 do not fit into the window of 32, which needs room for one more
        return np.full(len(ids) - 1, self.weight + 1e-4, np.float32)


def test_a_sync_sends_to_every_worker_and_reports_the_worst_gap() -> None:
    workers = {"w0": FakeWorker(), "w1": FakeWorker()}
    result = StoreWeightSync(FakeLearner(), FakeFleet(**workers), LearnerConfig()).push(3)
    assert workers["w1"].log == [("open", 3, "float32", 1), ("bucket", 0), ("close", 3)]
    assert result.policy_version == 3 and result.bytes == 8
    assert result.probe_gap == pytest.approx(1e-4, rel=1e-2)


def test_a_worker_that_missed_the_weights_gets_them_again_whole() -> None:
    workers = {"w0": FakeWorker(), "w1": FakeWorker(deaf=1)}
    StoreWeightSync(FakeLearner(), FakeFleet(**workers), LearnerConfig()).push(3)
    once = [("open", 3, "float32", 1), ("bucket", 0), ("close", 3)]
    assert workers["w0"].log == workers["w1"].log == once + once


class OpenLearner(FakeLearner):
    """Knows whether its stream has ended."""

    streaming = False

    def stream_weights(self, dtype: str) -> Iterator[Bucket]:
        self.streaming = True
        try:
            yield from super().stream_weights(dtype)
        finally:
            self.streaming = False


def test_a_sync_that_breaks_off_leaves_no_stream_open() -> None:
    learner, worker = OpenLearner(), FakeWorker()
    worker.load_bucket = Remote(lambda version, bucket: 1 // 0)
    with pytest.raises(ZeroDivisionError) as caught:
        StoreWeightSync(learner, FakeFleet(w0=worker), LearnerConfig()).push(3)
    assert not learner.streaming, "while the error, which keeps every frame alive, is still held"
    del caught


def test_a_worker_that_is_wrong_twice_stops_the_run_by_name_and_gap() -> None:
    sync = StoreWeightSync(FakeLearner(), FakeFleet(w0=FakeWorker(), w1=FakeWorker(deaf=2)), LearnerConfig())
    with pytest.raises(RunStopped, match=r"w1 does not compute .* 1\.5 nats apart .* learner\.probe_tolerance=0\.001"):
        sync.push(3)
