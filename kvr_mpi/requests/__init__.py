"""Documents on their way: where they come from, what is asked about each, and what their prompts share."""
