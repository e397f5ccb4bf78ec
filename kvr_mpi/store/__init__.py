"""The files of a run: logs with records, and HDF5 volumes with keys and values. Finished results are never lost.

``record`` is one document's outcome; ``log`` has records, ``volumes`` have keys and values, whose layout is in ``kv``;
``kv_reader`` and ``kv_writer`` read and write these. ``writer`` writes while a job runs, ``lock`` gives one job the
folder, ``folder`` surveys it, ``results`` reads one or several runs (``shares``), ``run`` starts or resumes a run,
``rewrite`` merges and prunes, ``status`` reports the progress.
"""
