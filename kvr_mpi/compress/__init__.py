"""Compression and FairKV: how many tokens each head keeps, and which rank holds it (papers.

FairKV, HeadKV, DuoAttention).
"""
