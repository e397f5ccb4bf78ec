"""Compression and FairKV: how many tokens each head keeps, and which rank holds it.

Papers: FairKV, HeadKV, DuoAttention.
"""
