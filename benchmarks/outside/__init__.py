"""Programs that run in another engine's own environment, which has not this package; see ``bench.rivals``."""
