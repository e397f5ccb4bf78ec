"""LoRA adapters for tests: random weights, as a training would leave them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers as tf

TARGETS = ["q_proj", "v_proj", "down_proj"]


def base_of(folder: Path) -> Any:
    return tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def save_adapter(model: Any, folder: Path, **settings: Any) -> Path:
    """An adapter of random weights, as a training would leave it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    given = {"r": 4, "lora_alpha": 16, "target_modules": TARGETS, "init_lora_weights": False, **settings}
    with quiet():
        get_peft_model(model, LoraConfig(**given, task_type="CAUSAL_LM")).save_pretrained(folder)
    return folder


@contextmanager
def quiet() -> Iterator[None]:
    """What peft says of itself and of transformers is not what is tested."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
