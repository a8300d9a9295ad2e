"""The way of the weights from a learner into engines: announced, streamed in buckets, verified, committed.

`sync` is the driver's side, `intake` and `vllm_plugin` the engine's. engines, learner and jobs may import it.
"""
