"""The files of a run: logs with records, and HDF5 volumes with keys and values. Finished results are never lost.

``record`` is one document's outcome; ``log`` has records, ``volumes`` have keys and values, whose layout is in ``kv``
and ``pieces``. ``writer`` writes, ``lock`` says whose folder it is, ``folder`` reads, ``run`` puts a folder in order
and goes on, ``rewrite`` merges and prunes, ``status`` tells how far it is, ``shares`` is for several runs.
"""
