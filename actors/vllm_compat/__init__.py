"""Everything that depends on vLLM's internals: weight transports, plug-in, executor, scheduler, stat logger.

`tests/actors/test_vllm_compat.py` names each vLLM symbol and signature in use. engines and learner may import it.
"""
