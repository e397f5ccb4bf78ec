"""What the leader of a chain sends to all of its ranks: a prompt with its plan, or the end of a wave's prefill.

A message is complete. Ranks that receive it hold no corpus, read no document and derive no plan.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from kvr_mpi.requests.prompt_request import PromptRequest
from kvr_mpi.runtime.chain_runner import ChainRunner
from kvr_mpi.runtime.planned_prompt import PlannedPrompt
from kvr_mpi.transport import Transport

LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class RunPrompt:
    """A prompt is prefilled as planned."""

    request: PromptRequest
    plan: PlannedPrompt


@dataclass(frozen=True, slots=True)
class EndPrefill:
    """Nothing more is prefilled before the ranks have decoded.

    has_more : prompts or documents wait for the next wave.
    goes_on : there is a next wave, if only because parts of documents are still to be answered.
    """

    has_more: bool
    goes_on: bool


Message = RunPrompt | EndPrefill


def share_message(members: Transport, message: Message | None, runner: ChainRunner) -> Message:
    """Give every rank of a chain the message of rank 0, its leader.

    Raises
    ------
    AgreementError
        If a plan and its prompt do not belong together.
    """
    data = b""
    if isinstance(message, RunPrompt):
        request, ids = message.request.to_wire()
        data = _pack({"request": request, "plan": message.plan.to_wire(message.request.key)}, ids)
    elif message is not None:
        data = _pack({"end": asdict(message)}, b"")
    data = members.broadcast(data)
    if message is not None:  # the leader has the objects themselves
        return message
    header_end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    header = json.loads(data[LENGTH_BYTES:header_end])
    if "end" in header:
        return EndPrefill(**header["end"])
    received = PromptRequest.from_wire(header["request"], data[header_end:])
    return RunPrompt(received, runner.planned(received, header["plan"]))


def _pack(header: dict[str, object], ids: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(LENGTH_BYTES, "little") + text + ids
