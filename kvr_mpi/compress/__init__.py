"""Compression: which tokens each head keeps.

Papers: HeadKV, DuoAttention, SnapKV, FairKV (``fairkv``).
"""
