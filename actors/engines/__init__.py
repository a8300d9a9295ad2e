"""vLLM in an actor: prompts in, sampled tokens, judgements or chat answers out; one worker and one fleet for each use.

Stands on `actors.fleet` and `actors.weights`; jobs may import it. vllm is imported inside the remote worker only.
"""
