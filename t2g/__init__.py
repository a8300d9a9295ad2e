"""Text2Grad: critiques in words become rewards on tokens. The method, free of Ray, vLLM and DeepSpeed.

May import numpy, torch, pydantic and, inside functions, transformers and datasets. Never ray, vllm or deepspeed.
"""
