"""Where threads stand, for a test that has waited for them too long."""

from __future__ import annotations

import sys
import threading
import traceback


def stacks_of(*prefixes: str) -> str:
    """The stacks of all threads whose names begin so."""
    frames = sys._current_frames()
    told = []
    for thread in threading.enumerate():
        if thread.name.startswith(prefixes) and thread.ident in frames:
            told.append(f"{thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident])[-8:])}")
    return "\n".join(told)
