"""Run a job: schedule documents in waves, prefill them, decode and store the answers."""
