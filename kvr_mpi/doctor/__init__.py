"""Is this machine ready? Every check is a function of observed facts and returns findings; `examine` runs them all.

``findings`` says what a check returns, ``facts`` what each rank sees, ``deadlines`` and ``supervise`` why nothing hangs
and no crash goes unsaid. The other files hold one subject each.
"""
