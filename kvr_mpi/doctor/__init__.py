"""``kvr doctor``: every check is a function of observed facts that returns findings; `examine` runs all of them.

``findings`` defines what a check returns, and ``facts`` what each rank observes. With ``deadlines`` and ``launch``
nothing hangs, and every crash is reported. Each of the other files has the checks of one subject.
"""
