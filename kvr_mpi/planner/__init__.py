"""How to cut a prompt: rates measured on this machine, and the split that lets all ranks end together."""
