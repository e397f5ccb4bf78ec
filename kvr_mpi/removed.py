"""Keys, options and commands that earlier versions had: each with one sentence that says what to do instead."""

# section.key of a job, or section.key=value where only that value is gone.
KEYS: dict[str, str] = {
    "parallel.compile": "Leave it out; a larger parallel.chunk_tokens saves launches and reads of weights.",
}

# A command, or a command and its option: "COMMAND --option".
COMMANDS: dict[str, str] = {}
