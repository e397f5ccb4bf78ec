"""``kvr verify``: compares chains with one process, on the user's own model."""

from __future__ import annotations

from pathlib import Path

import click

from kvr_mpi.cli.options import command, optional_job_argument, parse_names, parse_numbers, set_option
from kvr_mpi.errors import counted

EXIT_DIFFERS = 1


# In --lengths: the longest prompt that fits into the model's context.
CONTEXT = "context"
# Long enough for windows, and short enough for plain transformers; cut to the model's context.
DEFAULT = "64,512,4k"
SEED = 0


@command()
@optional_job_argument
@set_option
@click.option(
    "--lengths",
    default=DEFAULT,
    show_default=True,
    help=f"Prompt lengths in tokens; {CONTEXT}: the longest that the model accepts.",
)
def verify(job: Path | None, settings: tuple[str, ...], lengths: str) -> int:
    """Compare logits, keys, values and greedy tokens of chains and batches with plain transformers.

    \b
    mpirun -n 4 kvr verify jobs/summarize.toml --lengths 512,16k
    mpirun -n 4 kvr verify --set model.path=/models/mine --set model.dtype=bfloat16

    JOB names the model and the transport; without it, a small model in float32 is used.
    The exit code is 0 only if all of them agree.
    """  # noqa: D301
    from kvr_mpi.cli.environment import configure_libraries
    from kvr_mpi.cli.launch import run_guarded
    from kvr_mpi.transport.mpi import connect

    configure_libraries()
    world = connect()

    def work() -> int:
        from kvr_mpi.cli.launch import open_model_job
        from kvr_mpi.errors import ConfigError
        from kvr_mpi.logs import RankLogger
        from kvr_mpi.prefill.failure import is_out_of_memory
        from kvr_mpi.prefill.finite import explain_not_finite
        from kvr_mpi.prefill.self_check import check_chain
        from kvr_mpi.runtime.verify import NEW_TOKENS
        from kvr_mpi.runtime.verify import verify as verify_all
        from kvr_mpi.transport import together

        logger = RankLogger(world.rank)
        loaded, links = open_model_job(world, job, settings, logger)

        def choose() -> list[int]:
            context = loaded.shape.max_tokens
            most = (context or 4096) - NEW_TOKENS
            named = parse_names(lengths)
            numbers = ",".join(name for name in named if name != CONTEXT)
            chosen = sorted({*(parse_numbers("--lengths", numbers) if numbers else ()), *[most] * (CONTEXT in named)})
            if lengths == DEFAULT:
                chosen = sorted({min(length, most) for length in chosen})
            if not chosen or chosen[0] < 2 * world.size or (context is not None and chosen[-1] > most):
                raise ConfigError(
                    f"lengths {chosen}: expected from {2 * world.size} (two tokens per rank) to {most} (the model's "
                    f"context minus {NEW_TOKENS} tokens to decode); change --lengths"
                )
            return chosen

        chosen = together(world, choose)
        checked = together(world, lambda: check_chain(loaded))
        failed, count, are_finite = 0, 0, True
        try:
            for finding in verify_all(checked, links, chosen, SEED):
                count, failed = count + 1, failed + (not finding.holds)
                are_finite = are_finite and finding.is_finite
                logger.root.info(
                    f"{'holds' if finding.holds else 'DIFFERS'}: {finding.tokens:,} tokens, {finding.slices}: logits "
                    f"{finding.logits_error:.1e}, keys and values {finding.kv_error:.1e} of their spread (allowed "
                    f"{finding.allowed:.1e}), greedy tokens {'the same' if finding.same_tokens else 'DIFFERENT'}"
                )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            what = str(error).partition("\n")[0]
            raise ConfigError(
                f"--lengths {lengths}: not enough memory for plain transformers and a chain: {what}; shorten them"
            ) from error
        if not are_finite:
            logger.root.warning(explain_not_finite(loaded.dtype))
        logger.root.info(f"{count - failed} of {count} checks passed on {counted(world.size, 'rank')}")
        return EXIT_DIFFERS if failed else 0

    return run_guarded(world, work)
