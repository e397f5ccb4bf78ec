"""Is this machine ready? Every check is a function of observed facts and returns findings; `examine` runs them all.

``findings`` says what a check returns, ``facts`` what each rank sees, ``deadlines`` and ``process`` why nothing hangs
and every crash is reported. The other files hold one subject each.
"""
