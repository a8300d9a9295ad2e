"""Model FLOPs utilization (MFU) of training (Chowdhery et al., arXiv 2204.02311, app. B).

It counts the FLOPs that the model's formulas need: recomputation for gradient checkpointing does not count.
"""

from collections.abc import Sequence

from t2g.resources.model_shape import ModelShape

# Dense bfloat16 FLOP/s by a part of the device name that the driver reports; of the SXM variant if there are several.
PEAK_FLOPS = {"A100": 312e12, "L40S": 362e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}


def peak_flops(device_name: str) -> float | None:
    """Return the peak FLOP/s of a device, or None for an unknown device.

    >>> peak_flops("NVIDIA H100 80GB HBM3")
    989000000000000.0
    """
    for name, peak in PEAK_FLOPS.items():
        if name in device_name:
            return peak
    return None


def train_flops(shape: ModelShape, lengths: Sequence[int], *, has_head: bool, frozen: bool) -> float:
    """Return the FLOPs of a forward and a backward pass over sequences of these lengths.

    A token takes 6 FLOPs per matrix weight, or 4 per frozen weight (LoRA). Causal attention to t preceding tokens takes
    12 t FLOPs per layer and value of the heads; on average t is half the sequence. Embedding lookups take none.

    Llama 3 8B, one sequence of 1,000 tokens: 6 x 7,504,920,576 x 1000 + 6 x 32 x 4096 x 10^6 = 45.8 x 10^12
    """
    tokens = sum(lengths)
    pairs = sum(length * length for length in lengths)
    weights = shape.num_hidden_layers * shape.layer_numel
    if has_head:
        weights += shape.embedding_numel
    flops_per_weight = 4 if frozen else 6
    attention = 6 * shape.num_hidden_layers * shape.heads_numel * pairs
    return flops_per_weight * weights * tokens + attention
