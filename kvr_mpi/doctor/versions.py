"""Software: one version of everything on all ranks, and transformers within the range we are written for."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

from packaging.requirements import Requirement

from kvr_mpi.doctor.facts import RankFacts, group_ranks
from kvr_mpi.doctor.findings import Finding, number_ranges, ok, some, warn

DISTRIBUTION = "kvr-mpi"


def required_ranges() -> dict[str, str]:
    """Read what the package's metadata asks for: library to version range."""
    wanted = map(Requirement, importlib.metadata.requires(DISTRIBUTION) or [])
    return {one.name: str(one.specifier) for one in wanted if one.marker is None}


def check_versions(facts: Sequence[RankFacts], ranges: dict[str, str]) -> list[Finding]:
    """Name the versions; warn of those outside `ranges`, and of ranks that differ."""
    findings, versions = [], facts[0].versions
    for name, version in versions.items():
        if name not in ranges or Requirement(name + ranges[name]).specifier.contains(version, prereleases=True):
            continue
        text = f"{name} {version} is outside {ranges[name]}, the versions that this kvr-mpi supports"
        findings.append(warn("versions", text, f'pip install "{name}{ranges[name]}"'))
    for name in versions:
        groups = group_ranks(facts, lambda one, name=name: one.versions.get(name, "missing"))  # type: ignore[misc]
        if len(groups) > 1:
            shown = [f"{version} on rank(s) {number_ranges([r.rank for r in rs])}" for version, rs in groups.items()]
            findings.append(warn("versions", f"{name} differs: {some(shown)}", "use one environment on all hosts"))
    return [ok("versions", ", ".join(f"{name} {version}" for name, version in versions.items())), *findings]
