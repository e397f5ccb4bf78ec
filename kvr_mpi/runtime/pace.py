"""How long it takes until a document is answered, judged by what this chain has done so far."""

from __future__ import annotations


class Pace:
    """Work and time of a chain's waves.

    Work is in the job's unit (characters, or predicted milliseconds); times are of one clock.

    Parameters
    ----------
    now_s : float
        When the chain begins.
    """

    def __init__(self, now_s: float) -> None:
        self._began_s = self.wave_began_s = now_s
        self._past_work = self._wave_work = 0

    def begin_wave(self, now_s: float) -> None:
        """Begin a wave; the one before is through."""
        self._past_work += self._wave_work
        self.wave_began_s, self._wave_work = now_s, 0

    def add_work(self, work: int) -> None:
        """Take on a document's work in this wave."""
        self._wave_work += work

    def seconds_for(self, work: int, now_s: float) -> float:
        """Estimate how long it takes from now until a document of so much work is answered, with all in hand."""
        if self._past_work:
            rate = (self.wave_began_s - self._began_s) / self._past_work
        elif self._wave_work:
            rate = 2 * (now_s - self.wave_began_s) / self._wave_work  # decoding is yet to come: say, as long again
        else:
            return 0.0
        return max(0.0, rate * (self._wave_work + work) - (now_s - self.wave_began_s))
