"""Every architecture whose plan is followed gives its own logits on a group of two ranks, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as tf
from made_groups import on_groups, save_folder, truth_of
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.tiny import shrink
from kvr_mpi.errors import ModelError
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.tensor_parallel import why_no_plan
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.exactness import error_share
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.setup.job_ranks import JobRanks

PROMPT = [(position * position * 7 + 31 * position + 3) % 190 + 6 for position in range(40)]
# Of those it was seen to run.
LEAST = 25


def logits_of(ranks: JobRanks, loaded: LoadedModel) -> torch.Tensor | None:
    return prefill_kvr(loaded, PROMPT, Partition((0, len(PROMPT))), ranks.lane).logits


@pytest.mark.long
def test_every_architecture_is_exact_or_refused(tmp_path: Path) -> None:
    exact, wrong = [], []
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            config = shrink(kind)
            if why_no_plan(config):
                continue
            torch.manual_seed(0)
            model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            for weights in model.parameters():
                torch.nn.init.normal_(weights, mean=0.0 if weights.ndim > 1 else 1.0, std=0.2)
            truth, _ = truth_of(model, PROMPT, 1)
        except Exception:  # not a causal decoder on its own, or not on this machine
            continue
        try:
            found = on_groups(save_folder(tmp_path / kind, model), 1, 2, logits_of)
        except ModelError:
            continue
        is_exact = all(error_share(logits, truth) < 1e-4 for logits in found)
        (exact if is_exact else wrong).append(kind)
    assert not wrong and len(exact) >= LEAST, exact
