"""Run under mpirun: chains of real ranks give one process's logits, for random partitions. Prints one JSON line.

python mpi_chain.py ROUNDS auto|mpi|staged|gloo [NAME,NAME...]
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from chains import rival
from models import prompt, tiny
from open_ranks import open_ranks

from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr, prefill_single
from kvr_mpi.transport import gather_json, share_json
from kvr_mpi.transport.mpi import connect

rounds, tokens = int(sys.argv[1]), 60
torch.set_num_threads(1)
world = open_ranks(connect(), sys.argv[2])
RIVALRY = ["llama-gqa", "mistral-window", "falcon-mqa", "gpt2"]
names = sys.argv[3].split(",") if len(sys.argv) > 3 else RIVALRY
truths = {}
for name in names:
    prepare_model(tiny(name).model, chain=False)
    truths[name] = prefill_single(tiny(name).model, prompt(tokens), torch.device("cpu")).logits
    prepare_model(tiny(name).model, chain=True, in_parts=tiny(name).attends_in_parts)
draw = random.Random(7)
worst = 0.0
for number in range(rounds):
    name = names[number % len(names)]
    inner = sorted(draw.sample(range(1, tokens), world.size - 1))
    prefills = [prefill_kvr(tiny(name), prompt(tokens), Partition((0, *inner, tokens)), world)]
    if number % 4 == 0 and name in RIVALRY:  # the rivals know no partitions
        prefills += [rival("ring", tiny(name), prompt(tokens), world)]
        prefills += [rival("tsp-causal" if number % 8 else "tsp-dense", tiny(name), prompt(tokens), world)]
    for prefill in prefills:
        if prefill.logits is not None:
            worst = max(worst, float((prefill.logits - truths[name]).abs().max()))
worst = max(share_json(world, gather_json(world, worst)))
ranks = gather_json(world, world.rank)
if world.rank == 0:
    print(json.dumps({"size": world.size, "worst": worst, "ranks": ranks}))
