"""Credit for other trainers: texts, token ids and judgements become token rewards and advantages in one call.

May import loop and all packages below. Never ray, vllm or deepspeed; nor does anything that it imports. Inside t2g
nobody imports it: the loop uses the same functions one by one.
"""

from t2g.credit.assign import Credit, assign_credit

__all__ = ["Credit", "assign_credit"]
