"""Weight sync from a learner to engines: manifest, buckets, verification, commit.

`sync` runs in the driver, `intake` in the engine. vllm_compat, engines, learner and jobs may import it.
"""
