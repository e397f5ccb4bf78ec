"""Stored keys and values of earlier jobs: finding and reusing them."""
