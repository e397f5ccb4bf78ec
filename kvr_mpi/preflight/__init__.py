"""Checks of a job before anything is loaded; imports no torch."""
