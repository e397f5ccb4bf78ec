"""datatrove's inference runner over a batch file, with a local vLLM server: a pipeline as its documentation has it.

Runs with the Python of an environment that has ``datatrove`` and ``vllm``; imports nothing of this project.
Usage: run_datatrove.py REQUESTS MODEL OUTPUT CONTEXT_TOKENS compiles|eager
"""

import sys
from typing import Any

from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter


def as_document(reader: Any, row: dict[str, Any], path: str, number: int | str) -> dict[str, Any]:
    """Make a document of a request."""
    body = row["body"]
    return {"text": body["messages"][-1]["content"], "id": row["custom_id"], "metadata": {"body": body}}


class CountingRunner(InferenceRunner):
    """Says on standard output what the server has answered, which is not what the cache has."""

    async def _send_request(self, server: Any, payload: dict[str, Any], semaphore: Any) -> Any:
        result = await super()._send_request(server, payload, semaphore)
        print(f"answered {payload['messages'][-1]['content'][:20]!r}", flush=True)
        return result


async def answer(document: Document, generate: Any) -> Any:
    """One request a document, as it is."""
    return await generate(dict(document.metadata["body"]))


def main() -> None:
    """Run the pipeline; the same call goes on with what a killed one left."""
    requests, model, output, context_tokens, how = sys.argv[1:]
    folder, _, name = requests.rpartition("/")
    runner = CountingRunner(
        rollout_fn=answer,
        config=InferenceConfig(
            server_type="vllm",
            model_name_or_path=model,
            model_max_context=int(context_tokens),
            model_kwargs={"dtype": "float32"} | ({"enforce-eager": True} if how == "eager" else {}),
            server_start_timeout_sec=600,
        ),
        output_writer=JsonlWriter(f"{output}/answers", "${rank}_${chunk_index}.jsonl", compression=None),
        checkpoints_local_dir=f"{output}/checkpoints",
        records_per_chunk=10,
    )
    reader = JsonlReader(folder, glob_pattern=name, adapter=as_document)
    LocalPipelineExecutor([reader, runner], tasks=1, logging_dir=f"{output}/logs").run()


if __name__ == "__main__":
    main()
