"""Estimates when a document will be answered, from the chain's waves so far."""

from __future__ import annotations


class Pace:
    """Work and duration of a chain's waves.

    Work is in the job's unit (characters or predicted milliseconds); all times come from the same clock.
    """

    def __init__(self, now_s: float) -> None:
        self._began_s = self.wave_began_s = now_s
        self._past_work = self._wave_work = 0

    def begin_wave(self, now_s: float) -> None:
        """End the previous wave and begin a new one."""
        self._past_work += self._wave_work
        self.wave_began_s, self._wave_work = now_s, 0

    def add_work(self, work: int) -> None:
        """Add a document's work to this wave."""
        self._wave_work += work

    def seconds_for(self, work: int, now_s: float) -> float:
        """Estimate the seconds until a document of this much work is answered, after all work in progress."""
        if self._past_work:
            rate = (self.wave_began_s - self._began_s) / self._past_work
        elif self._wave_work:
            rate = 2 * (now_s - self.wave_began_s) / self._wave_work  # assume that decoding takes as long as prefill
        else:
            return 0.0
        return max(0.0, rate * (self._wave_work + work) - (now_s - self.wave_began_s))
