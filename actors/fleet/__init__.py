"""Workers that come, go, hang and die: requests in, answers out, from any of them.

`health` decides what becomes of a worker, `admission` what is sent to it, `member` is one, `fleet` all of them. Knows
nothing of vLLM.
"""
