"""Ray: one file per kind of process, a plain Worker (remote side) and a Fleet or Group (driver side).

May import t2g and ray. vllm and deepspeed are imported late, inside functions: on remote workers, and by
`vllm_compat.tool_parsers` also on the driver. `executor.py`, `plugin.py` and `scheduler.py` of `vllm_compat`, which
vLLM itself loads, are exempt. Nothing here decides anything about the method.
"""
