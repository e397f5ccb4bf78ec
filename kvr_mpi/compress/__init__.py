"""FairKV: which heads keep how much, and which rank holds which head (papers: FairKV, HeadKV, DuoAttention)."""
