"""FairKV: the ranks of a chain decode all their prompts together, each some of the heads, in balance.

A feature beside the core, which meets it in one place: `runtime.prepare` opens ``sharing``; everything else knows only
a `decode.group.HeadSharing`.
"""
