"""``kvr doctor``: every check is a function of observed facts that returns findings; `examine` runs all of them.

``findings`` says what a check returns, ``facts`` what each rank sees, ``deadlines`` and ``process`` why nothing hangs
and every crash is reported. The other files hold one subject each.
"""
