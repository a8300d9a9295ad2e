"""Ranks under ZeRO-3: batches in, updates, log-probabilities, weights and checkpoints out; supervised training as well.

`zero3` and `full_weights` alone know DeepSpeed. jobs may import it.
"""
