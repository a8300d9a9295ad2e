"""What `t2g init` writes into a new folder: a critic, prompts, a config and a README. The user's own from then on."""
