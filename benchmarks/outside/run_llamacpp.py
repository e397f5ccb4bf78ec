"""llama.cpp, told what to run line by line: a prompt's first token, or a whole corpus.

Runs with the Python of an environment that has ``xllamacpp``, llama.cpp's own server with no HTTP between; imports
nothing of this package. Several prompts at once by continuous batching, nothing kept from prompt to prompt. It rounds
activations to the type of the weights where it multiplies: how far that leads is measured.
"""

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xllamacpp

Found = dict[str, Any]
# Kept free of each prompt's part of the cache, beside the prompt and its answer.
SPARE_TOKENS = 8


def main() -> None:
    """Load the model of the first argument on as many threads as the second says, and do what each line asks.

    The third is the longest prompt with its answer, in tokens; the fourth how many of them may be at work at once; the
    fifth the dtype, which chooses the type of keys and values: float16 beside bfloat16, since it is the fastest.
    """
    path, threads, longest, at_once = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    cache = {"float32": "F32", "bfloat16": "F16"}[sys.argv[5]]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints is no answer
    params = xllamacpp.CommonParams()
    params.model.path = path
    for cores in (params.cpuparams, params.cpuparams_batch):
        cores.n_threads = threads
    params.n_ctx = at_once * (longest + SPARE_TOKENS)
    params.n_parallel = at_once
    params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{cache}")
    params.cache_prompt = False
    params.cache_ram_mib = 0
    params.fit_params = False
    server = xllamacpp.Server(params)
    weights = next(part for part in reversed(os.path.basename(path).split("-")) if part in ("f32", "f16", "bf16"))
    about = {"version": xllamacpp.__version__, "runs_in": f"{weights} weights, keys and values {cache.lower()}"}
    print(json.dumps(about), file=answers, flush=True)
    with ThreadPoolExecutor(at_once) as pool:
        for line in sys.stdin:
            asked = json.loads(line)
            print(json.dumps(answer(server, pool, **asked)), file=answers, flush=True)


def answer(
    server: xllamacpp.Server,
    pool: ThreadPoolExecutor,
    prompts: list[list[int]],
    new_tokens: int,
    ends: list[int] | None,
) -> dict[str, object]:
    """Answer prompts greedily, as many at once as the server has room for.

    Parameters
    ----------
    prompts : of token ids.
    new_tokens : of each answer, at most.
    ends : tokens that end an answer; it ends at those that the model's file names. None for nothing does.
    """

    def one(prompt: list[int], tokens: int) -> Found:
        asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 1, "cache_prompt": False}
        found: Found = server.handle_completions(asked | {"ignore_eos": ends is None})
        if "choices" not in found:
            raise RuntimeError(f"llama.cpp: {json.dumps(found)[:500]}")
        return found

    began, began_cpu = time.perf_counter(), time.process_time()
    found = list(pool.map(lambda prompt: one(prompt, new_tokens), prompts))
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    # A token that is part of a letter is told with the letter.
    pairs = zip(prompts, found, strict=True)
    found = [each if content(each) else one(prompt, new_tokens + 3) for prompt, each in pairs]
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "tokens": [[token["id"] for token in content(each)][:new_tokens] for each in found],
        "logprobs": [sum(token["logprob"] for token in content(each)[:new_tokens]) for each in found],
    }


def content(found: Found) -> list[Found]:
    """Tokens of an answer."""
    tokens: list[Found] = (found["choices"][0].get("logprobs") or {}).get("content") or []
    return tokens


main()
