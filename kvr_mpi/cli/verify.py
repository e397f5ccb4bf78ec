"""``kvr verify``: exactness against one process, on the user's own model."""

from __future__ import annotations

import click

from kvr_mpi.cli.options import command, model_options, parse_numbers, transport_option
from kvr_mpi.errors import counted

EXIT_DIFFERS = 1


@command()
@model_options(dtype="float32")
@click.option("--lengths", default="64,512", show_default=True, help="Prompt lengths in tokens.")
@click.option(
    "--longest",
    type=click.IntRange(1),
    help="The longest prompt length, always checked.  [default: the model's context]",
)
@transport_option
@click.option("--seed", default=0, show_default=True, help="Random seed for prompts and random partitions.")
def verify(
    model: str,
    dtype: str,
    device: str,
    lengths: str,
    longest: int | None,
    transport: str,
    seed: int,
) -> int:
    """Compare logits, keys, values and greedy tokens of every strategy with plain transformers.

    \b
    mpirun -n 4 kvr verify --model /models/mine --dtype bfloat16 --longest 16k

    The exit code is 0 only if all of them agree.
    """  # noqa: D301
    from kvr_mpi.cli.launch import guarded
    from kvr_mpi.transport.mpi import connect

    world = connect()

    def work() -> int:
        from kvr_mpi.cli.launch import load_everywhere, open_links
        from kvr_mpi.errors import ConfigError
        from kvr_mpi.prefill.self_check import check_chain
        from kvr_mpi.prefill.verify import NEW_TOKENS, does_not_fit
        from kvr_mpi.prefill.verify import verify as verify_all
        from kvr_mpi.report.log import Log
        from kvr_mpi.transport import together

        log = Log(world.rank)
        loaded = load_everywhere(world, model, dtype, device)
        links = open_links(world, loaded, transport, log)

        def choose() -> list[int]:
            context = loaded.shape.max_tokens
            most = (context or 4096) - NEW_TOKENS
            chosen = sorted({*parse_numbers("--lengths", lengths), longest or most})
            if chosen[0] < 2 * world.size or (context is not None and chosen[-1] > most):
                raise ConfigError(
                    f"lengths {chosen}: expected from {2 * world.size} (two tokens per rank) to {most} (the model's "
                    f"context minus {NEW_TOKENS} tokens to decode); change --lengths or --longest"
                )
            return chosen

        chosen = together(world, choose)
        checked = together(world, lambda: check_chain(loaded))
        for line in does_not_fit(checked):
            log.root(line)
        failed = count = 0
        for finding in verify_all(checked, links, chosen, seed):
            count, failed = count + 1, failed + (not finding.holds)
            log.root(
                f"{'holds' if finding.holds else 'DIFFERS'}: {finding.tokens} tokens, {finding.strategy}: logits "
                f"{finding.logits_error:.1e}, keys and values {finding.kv_error:.1e} of their spread (allowed "
                f"{finding.allowed:.1e}), greedy tokens {'the same' if finding.same_tokens else 'DIFFERENT'}"
            )
        log.root(f"{count - failed} of {count} hold on {counted(world.size, 'rank')}")
        return EXIT_DIFFERS if failed else 0

    return guarded(world, work)
