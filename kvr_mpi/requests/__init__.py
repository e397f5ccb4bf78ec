"""Documents in progress: their sources, their prompts, and the tokens that prompts share."""
