"""System errors and losses that calls suffer, for the tests of what becomes of them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any


def failing(call: Callable[..., Any], fault: Callable[[str], BaseException], of: str = "", *, times: int = 1) -> Any:
    """Make the first calls for a path that contains `of` raise what `fault` makes of the path."""
    left = [times]

    def wrapped(path: Any, *args: Any, **options: Any) -> Any:
        if re.search(of, str(path)):
            left[0] -= 1
            if left[0] >= 0:
                raise fault(str(path))
        return call(path, *args, **options)

    return wrapped


def system_error(number: int) -> Callable[[str], BaseException]:
    return lambda path: OSError(number, os.strerror(number), path)
