"""What this machine does with each way to work: ``prompts`` (time to first token), ``corpus`` (documents an hour)."""
