"""Run under mpirun: random prompts one after the other without a barrier, some of which fail. Prints one JSON line.

python mpi_pipeline.py PROMPTS
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pipelines import Failing, draw_prompts, run_prompts, truths

from kvr_mpi.transport import gather_json, share_json
from kvr_mpi.transport.choose import open_transport
from kvr_mpi.transport.mpi import connect

torch.set_num_threads(1)
world, _ = open_transport(connect(), "mpi", torch.device("cpu"), every_pair=True)
models = ("llama-gqa", "mistral-window", "falcon-mqa")
prompts = draw_prompts(int(sys.argv[1]), world.size, seed=world.size, failing=0.3, models=models)
logits = truths(prompts)
failing = Failing()
try:
    with failing.installed(models):
        worst = run_prompts(world, prompts, logits, failing)
except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
    world.abort(1)
worst = max(share_json(world, gather_json(world, worst)))
if world.rank == 0:
    print(json.dumps({"size": world.size, "worst": worst}))
