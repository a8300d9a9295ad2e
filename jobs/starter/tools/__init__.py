"""Files that `t2g init --template tools` copies: tools, questions, a reward, and a config."""
