"""What is kept: the HDF5 schema, and the files of a run, of which nothing that counts is ever lost.

``outputs`` owns the schema and ``kv`` the keys and values in it. ``shards`` writes, ``ledger`` says what is
durable, ``lock`` whose folder it is; ``survey`` holds files against the ledger, ``run`` puts a folder in order and goes
on, ``folder`` reads, ``summary`` counts, ``merge`` makes one file, ``status`` tells how far it
is, ``shares`` is for several runs.
"""
