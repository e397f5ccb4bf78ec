"""What is kept: the HDF5 schema, and the files of a run.

``outputs`` owns the schema (version 1) and ``kv`` the keys and values in it; ``folder`` knows which files make
up a run, and how they come to be complete or not at all.
"""
