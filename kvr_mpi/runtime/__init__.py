"""Running a job: documents are scheduled in waves, prefilled, decoded and stored."""
