"""What is wrong with a job, and what it reads, as far as it shows before anything is loaded; no torch."""
