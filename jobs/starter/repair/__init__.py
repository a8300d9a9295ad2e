"""Files that `t2g init --template repair` copies: conversations, a function that aligns replies, and a config."""
