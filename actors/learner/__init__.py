"""Learner ranks under ZeRO-3: updates, log-probabilities, weights, checkpoints; supervised training and DPO.

Only `zero3` and `full_weights` know DeepSpeed. jobs may import it.
"""
