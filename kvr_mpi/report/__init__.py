"""What the user sees of a job: log lines, progress, tables and the HTML report."""
