"""Cutting weights into buckets, and the hashes that travel with them."""

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from actors.weights.buckets import get_module_name, hash_arrays, make_bucket, num_bytes, plan_buckets

LLAMA = {
    "model.embed_tokens.weight": (10, 4),  # 40
    "model.layers.0.self_attn.q_proj.weight": (4, 4),
    "model.layers.0.self_attn.k_proj.weight": (2, 4),  # layer 0: 24
    "model.layers.1.self_attn.q_proj.weight": (4, 4),
    "model.layers.1.self_attn.k_proj.weight": (2, 4),  # layer 1: 24
    "model.norm.weight": (4,),
}


def test_buckets_hold_whole_layers_up_to_their_size() -> None:
    # float32: embedding 160 bytes, a layer 96, the norm 16
    buckets = plan_buckets(LLAMA, dtype="float32", bucket_bytes=112)
    assert [list(bucket) for bucket in buckets] == [
        ["model.embed_tokens.weight"],
        ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"],
        ["model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight", "model.norm.weight"],
    ]
    # bfloat16 halves them: 80 + 48 > 112, 48 + 48 + 8 = 104
    assert [len(b) for b in plan_buckets(LLAMA, dtype="bfloat16", bucket_bytes=112)] == [1, 5]
    assert [len(b) for b in plan_buckets(LLAMA, dtype="float32", bucket_bytes=1e9)] == [6]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from("abc"), st.integers(1, 64)), unique_by=lambda t: t[:2]),
    st.integers(1, 2000),
)
def test_every_name_is_sent_once_and_no_layer_is_split(rows: list[tuple[int, str, int]], bucket_bytes: int) -> None:
    shapes = {f"model.layers.{layer}.{part}.weight": (size,) for layer, part, size in rows}
    buckets = plan_buckets(shapes, dtype="float32", bucket_bytes=bucket_bytes)
    assert sorted(n for b in buckets for n in b) == sorted(shapes)
    homes = {}
    for index, bucket in enumerate(buckets):
        for name in bucket:
            assert homes.setdefault(get_module_name(name), index) == index
    sizes = {name: 4 * size for name, (size,) in shapes.items()}
    for bucket in buckets:
        one_module = len({get_module_name(n) for n in bucket}) == 1
        assert one_module or sum(sizes[n] for n in bucket) <= bucket_bytes


def test_bias_and_weight_of_a_module_outside_the_layers_stay_together() -> None:
    assert get_module_name("lm_head.weight") == get_module_name("lm_head.bias") == "lm_head"
    assert get_module_name("transformer.h.11.attn.c_attn.bias") == "transformer.h.11"


def test_the_hash_is_of_the_bytes_and_of_nothing_else() -> None:
    matrix = np.arange(6, dtype=np.uint16).reshape(2, 3)
    vector = np.float32([1.5, -2])
    bucket = make_bucket(3, ["a", "b"], [matrix, vector], full=True, started=0.0)
    data = matrix.tobytes() + vector.tobytes()
    assert bucket.transport_meta["xxh3"] == xxhash.xxh3_64_hexdigest(data)
    assert bucket.index == 3
    assert bucket.names == ("a", "b")
    assert bucket.transport_meta["tensor_xxh3"] == [xxhash.xxh3_64_hexdigest(part) for part in (data[:12], data[12:])]
    assert make_bucket(0, ["a"], [matrix], full=False, started=0.0).transport_meta["tensor_xxh3"] == []
    changed = vector.copy()
    changed.view(np.uint8)[0] ^= 1
    assert hash_arrays(matrix, changed) != bucket.transport_meta["xxh3"]


def test_bytes_are_counted_in_the_type_that_travels() -> None:
    assert num_bytes(LLAMA, "float32") == 4 * (40 + 24 + 24 + 4) == 2 * num_bytes(LLAMA, "bfloat16")
