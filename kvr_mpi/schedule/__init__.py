"""Plan a job: which documents run on which ranks, and when."""
