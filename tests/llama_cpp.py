"""llama.cpp as a reference: token ids of a text, and logits of a prompt, of a GGUF file.

It runs in another process, because it ends its process when it meets some damaged files.
"""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class LlamaCpp:
    """Answers from llama.cpp; None where it refuses a file."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "LlamaCpp":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def ask(
        self, path: Path, *, texts: Sequence[str], prompts: Sequence[Sequence[int]], letter: int, context: int = 256
    ) -> Any:
        """Return the ids of texts (`ids`), and the log probabilities of all tokens after each prompt (`logprobs`).

        letter : a token that is a whole character.
        """
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        question = {"path": str(path), "texts": texts, "prompts": prompts, "letter": letter, "context": context}
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:  # llama.cpp ended its process
            self._process.communicate()
            self._process = None
            return None
        return json.loads(answer)


def answer(question: dict[str, Any]) -> dict[str, Any] | None:
    """Load a model and answer; None if llama.cpp cannot load it."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = question["path"]
    for cores in (params.cpuparams, params.cpuparams_batch):
        cores.n_threads = 1
    params.n_ctx, params.n_parallel, params.warmup, params.fit_params = question["context"], 1, False, False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_ram_mib, params.use_jinja, params.swa_full = 0, False, True
    try:
        server = xllamacpp.Server(params)
    except Exception:
        return None
    found: dict[str, Any] = {"ids": [], "logprobs": []}
    for text in question["texts"]:
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        request = urllib.request.Request(
            f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as reply:
            found["ids"].append(json.loads(reply.read())["tokens"])
    for prompt in question["prompts"]:
        # The answer is forced to be a whole character: llama.cpp reports no token that is a part of one. The log
        # probabilities are from before that.
        bias = [[question["letter"], 1000.0]]
        asked = {"prompt": prompt, "max_tokens": 1, "cache_prompt": False, "n_probs": 1_000_000, "logit_bias": bias}
        (token,) = server.handle_completions(asked)["choices"][0]["logprobs"]["content"]
        row = sorted((each["id"], each["logprob"]) for each in token["top_logprobs"])
        found["logprobs"].append([value for _, value in row])
    return found


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp prints to the standard output
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
