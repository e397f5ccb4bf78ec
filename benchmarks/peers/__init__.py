"""Programs that answer batch files, killed at half."""
