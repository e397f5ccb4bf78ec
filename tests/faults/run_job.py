"""``kvr-run`` as it is, but ``impatient``.

KVR_TEST_CLOCK makes the clock jump. KVR_TEST_VIEW lets one rank see other files or another clock than the rest: a JSON
object of `rank`; `kind`; `name`, a part of the path that is seen so; `first` and `times`, of the accesses to it;
`other`, a file that is seen in its place.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import h5py
import impatient  # noqa: F401

from kvr_mpi.cli import kvr_run

RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")


class View:
    """What one rank sees of paths with a name in them; the others see what is there."""

    def __init__(self, view: dict[str, Any]) -> None:
        self._name, self._kind, self._other = view["name"], view["kind"], view.get("other", "")
        self._first, self._times, self._seen = view["first"], view["times"], 0

    def is_now(self, path: object, kind: str) -> bool:
        """Whether an access to a path is one of those that see something else; counts those of this kind."""
        if self._kind != kind or isinstance(path, int) or self._name not in os.fsdecode(path):  # type: ignore[arg-type]
            return False
        self._seen += 1
        return self._first < self._seen <= self._first + self._times

    def opened(self, path: Any) -> Any:
        """Return what is opened instead of a path."""
        if self.is_now(path, "read-error"):
            raise OSError(116, os.strerror(116), str(path))
        if self.is_now(path, "missing"):
            raise FileNotFoundError(2, os.strerror(2), str(path))
        return self._other if self.is_now(path, "content") else path

    def install(self) -> None:
        """See the file system so from now on."""
        real_open, real_stat = os.open, os.stat

        def see_open(path: Any, *args: Any, **kwargs: Any) -> int:
            return real_open(self.opened(path), *args, **kwargs)

        def see_stat(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
            if self.is_now(path, "missing"):
                raise FileNotFoundError(2, os.strerror(2), str(path))
            return real_stat(path, *args, **kwargs)

        class SeenFile(h5py.File):  # type: ignore[misc]
            """An HDF5 file as this rank sees it."""

            def __init__(seen, name: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:  # noqa: N805
                super().__init__(self.opened(name) if mode == "r" else name, mode, *args, **kwargs)

        os.open, os.stat, h5py.File = see_open, see_stat, SeenFile  # type: ignore[assignment,misc]


def jump(after_s: float, jump_s: float) -> None:
    """Let the clock jump so far, as if somebody set it, so many seconds from now."""
    began, real_time = time.monotonic(), time.time
    time.time = lambda: real_time() + (jump_s if time.monotonic() - began > after_s else 0.0)


if clock := os.environ.pop("KVR_TEST_CLOCK", ""):
    jump(*map(float, clock.split()))
view: dict[str, Any] = json.loads(os.environ.pop("KVR_TEST_VIEW", "{}"))
rank = next((int(os.environ[name]) for name in RANKS if name in os.environ), 0)
if view and view["rank"] == rank:
    if view["kind"] == "clock":
        jump(-1, (-1) ** view["first"] * 5 * 3600.0)
    else:
        View(view).install()
kvr_run()
