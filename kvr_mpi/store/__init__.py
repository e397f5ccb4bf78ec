"""What is kept: the files of a run, of which nothing that counts is ever lost.

``record`` is one document's outcome; ``log`` has records, ``volumes`` have keys and values, whose layout is in ``kv``
and ``pieces``. ``writer`` writes, ``lock`` says whose folder it is, ``folder`` reads, ``run`` puts a folder in order
and goes on, ``rewrite`` merges and prunes, ``status`` tells how far it is, ``shares`` is for several runs.
"""
