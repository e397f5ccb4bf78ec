"""The files of a run: logs with records, and HDF5 volumes with keys and values. Finished results are never lost.

``record`` is one document's outcome; ``log`` has records, ``volumes`` have keys and values, whose layout is in ``kv``
and ``pieces``. ``writer`` writes, ``lock`` gives one job the folder, ``folder`` reads, ``run`` starts or resumes a run,
``rewrite`` merges and prunes, ``status`` reports the progress, ``shares`` reads several runs as one.
"""
