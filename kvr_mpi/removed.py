"""Keys, options and commands that earlier versions had: each with one sentence that says what to do instead."""

# section.key of a job, or section.key=value where only that value is gone.
KEYS: dict[str, str] = {}

# A command, or a command and its option: "COMMAND --option".
COMMANDS: dict[str, str] = {}
