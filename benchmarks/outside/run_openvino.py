"""OpenVINO GenAI, told what to run line by line: a prompt's first token, or a whole corpus.

Runs with the Python of an environment that has ``openvino-genai``; imports nothing of this package. Paged attention;
weights, activations, keys and values in float32 or bfloat16, not quantized while it runs; nothing kept from prompt to
prompt. What it computes in may be another type than it is asked for, and is told.
"""

import json
import os
import sys
import time

import numpy as np
import openvino as ov
import openvino.opset13 as ops
import openvino_genai as genai


def main() -> None:
    """Load the model of the first argument on as many threads as the second says, and do what each line asks.

    The third is the longest prompt with its answer, in tokens; the fifth the dtype.
    """
    path, threads, longest, dtype = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[5]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints is no answer
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = longest
    scheduler.cache_size = 0  # grows as it must
    scheduler.dynamic_split_fuse = True
    precision = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    # Its paged attention refuses a cache in bfloat16 on processors without instructions for it.
    capabilities = ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    settings = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision if precision.upper() in capabilities else "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        "INFERENCE_NUM_THREADS": threads,
    }
    pipe = genai.LLMPipeline(path, "CPU", scheduler_config=scheduler, **settings)
    about = {"version": genai.__version__, "runs_in": executed(settings)}
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(answer(pipe, **asked)), file=answers, flush=True)


def executed(settings: dict[str, object]) -> str:
    """Ask what a product of matrices runs in with these settings, by its node in a compiled model, and the cache."""
    rows = ops.parameter([-1, 64], dtype=np.float32)
    weights = ops.constant(np.ones((64, 64), dtype=np.float32))
    model = ov.Model([ops.result(ops.matmul(rows, weights, False, True))], [rows])
    compiled = ov.Core().compile_model(model, "CPU", settings)
    found = [node.get_rt_info() for node in compiled.get_runtime_model().get_ordered_ops()]
    kinds = {str(info["runtimePrecision"].value) for info in found if info["layerType"].value == "FullyConnected"}
    cache = compiled.get_property("KV_CACHE_PRECISION").get_type_name()
    return f"{' and '.join(sorted(kinds))}, keys and values {cache}"


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
