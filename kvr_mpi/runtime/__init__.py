"""A job at work: made ready, scheduled in waves, prefilled, decoded and written."""
