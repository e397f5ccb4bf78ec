"""OpenVINO GenAI, told what to run line by line: a prompt's first token, or a whole corpus.

Runs with the Python of an environment that has ``openvino-genai``; imports nothing of this package. Paged attention in
float32, weights in float32, nothing rounded while it runs, nothing kept from prompt to prompt.
"""

import json
import os
import sys
import time

import numpy as np
import openvino as ov
import openvino_genai as genai


def main() -> None:
    """Load the model of the first argument on as many threads as the second says, and do what each line asks."""
    path, threads, longest = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints is no answer
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = longest
    scheduler.cache_size = 0  # grows as it must
    scheduler.dynamic_split_fuse = True
    pipe = genai.LLMPipeline(
        path,
        "CPU",
        scheduler_config=scheduler,
        INFERENCE_PRECISION_HINT="f32",
        KV_CACHE_PRECISION="f32",
        DYNAMIC_QUANTIZATION_GROUP_SIZE=0,
        INFERENCE_NUM_THREADS=threads,
    )
    print(json.dumps({"version": genai.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(answer(pipe, **asked)), file=answers, flush=True)


def answer(
    pipe: genai.LLMPipeline, prompts: list[list[int]], new_tokens: int, ends: list[int] | None
) -> dict[str, object]:
    """Answer prompts greedily, all of them at once.

    Parameters
    ----------
    prompts : of token ids.
    new_tokens : of each answer, at most.
    ends : tokens that end an answer; None for nothing does.
    """
    config = genai.GenerationConfig()
    config.max_new_tokens = new_tokens
    config.do_sample = False
    config.logprobs = 1
    config.ignore_eos = ends is None
    if ends is not None:
        config.stop_token_ids = set(ends)
    longest = max(map(len, prompts))
    ids = np.zeros((len(prompts), longest), dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(mask))
    began, began_cpu = time.perf_counter(), time.process_time()
    found = pipe.generate(inputs, config)
    return {
        "seconds": time.perf_counter() - began,
        "cpu_s": time.process_time() - began_cpu,
        "tokens": [list(map(int, row)) for row in found.tokens],
        "logprobs": [float(score) for score in found.scores],
    }


main()
