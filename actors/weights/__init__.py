"""Weight sync from a learner to engines: manifest, buckets, verification, commit.

`sync` runs in the driver, `weight_receiver` in the engine. vllm_compat, engines, learner and jobs may import it.
"""
