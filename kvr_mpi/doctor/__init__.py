"""``kvr doctor``: every check is a function of observed facts that returns findings; `steps.diagnose` runs all of them.

``findings`` defines what a check returns, and ``facts`` what each rank observes. Each of the other files has the checks
of one subject.
"""
