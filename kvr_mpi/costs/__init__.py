"""What a prompt costs on some ranks, in seconds and bytes: counted, computed from a machine's rates, never run."""
