"""Documents in progress: their source, their prompts, and what the prompts share."""
