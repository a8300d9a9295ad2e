"""Files that `t2g init` copies into a new folder: a feedback function, prompts, a config and a README."""
