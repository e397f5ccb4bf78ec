"""vLLM on CPUs, told what to run line by line: a prompt's first token, or a whole corpus.

Runs with the Python of an environment that has ``vllm``; imports nothing of this package. It reads a folder of
safetensors, computes in this process without compiling the model, and keeps nothing from prompt to prompt.
"""

import json
import os
import sys
import time
from typing import Any

# Keys and values of so many GiB; vLLM takes this memory before it starts.
CACHE_GIB = 2


def main() -> None:
    """Load the model of the first argument on as many threads as the second says, and do what each line asks.

    The third is the longest prompt with its answer, in tokens; the fourth how many of them may be at work at once; the
    fifth the dtype.
    """
    path, threads, longest, at_once, dtype = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints is no answer
    cores = sorted(os.sched_getaffinity(0))[: int(threads)]
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
    }
    import vllm

    engine = vllm.LLM(
        path,
        dtype=dtype,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=longest,
        max_num_batched_tokens=max(longest, 2048),
        max_num_seqs=at_once,
        disable_log_stats=True,
    )
    runs_in = f"{engine.llm_engine.model_config.dtype}".removeprefix("torch.")
    print(json.dumps({"version": vllm.__version__, "runs_in": runs_in}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(answer(engine, **asked)), file=answers, flush=True)


def answer(engine: Any, prompts: list[list[int]], new_tokens: int, ends: list[int] | None) -> dict[str, object]:
    """Answer prompts greedily, all of them at once.

    Parameters
    ----------
    prompts : of token ids.
    new_tokens : of each answer, at most.
    ends : tokens that end an answer; None for nothing does.
    """
    from vllm import SamplingParams

    settings = SamplingParams(
        temperature=0.0,
        max_tokens=new_tokens,
        logprobs=1,
        ignore_eos=ends is None,
        stop_token_ids=ends,
        detokenize=False,
    )
    began, began_cpu = time.perf_counter(), time.process_time()
    found = engine.generate([{"prompt_token_ids": ids} for ids in prompts], settings, use_tqdm=False)
    answers = [each.outputs[0] for each in found]
    return {
        "seconds": time.perf_counter() - began,
        "cpu_s": time.process_time() - began_cpu,
        "tokens": [list(each.token_ids) for each in answers],
        "logprobs": [float(each.cumulative_logprob) for each in answers],
    }


main()
