"""``kvr verify``: exactness against one process, on the user's own model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import click

from kvr_mpi.cli.options import command, model_options, parse_names, parse_numbers, transport_option

EXIT_DIFFERS = 1


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """Arguments of ``kvr verify``, as described in its help."""

    model: str
    dtype: str
    device: str
    lengths: str
    longest: int | None
    transport: str
    seed: int
    architectures: bool
    only: str
    sample: int | None
    table: Path | None
    lines: IO[str] | None


@command()
@model_options(dtype="float32")
@click.option("--lengths", default="64,512", show_default=True, help="Prompt lengths in tokens.")
@click.option(
    "--longest",
    type=click.IntRange(1),
    help="The longest prompt length, always checked.  [default: the model's context]",
)
@transport_option
@click.option("--seed", default=0, show_default=True, help="Random seed for prompts, random partitions and --sample.")
@click.option(
    "--architectures",
    is_flag=True,
    help="Instead of a model, check every architecture in transformers, tiny and random.",
)
@click.option(
    "--only", default="", metavar="NAME,...", help="With --architectures: check only these model types and variants."
)
@click.option("--sample", type=click.IntRange(1), help="With --architectures: check only this many, chosen at random.")
@click.option(
    "--table", type=click.Path(dir_okay=False, path_type=Path), help="With --architectures: write a Markdown table."
)
@click.option(
    "--json", "lines", type=click.File("w"), help="With --architectures: write one line of JSON per architecture."
)
def verify(**given: Any) -> int:
    """Compare logits, keys, values and greedy tokens of every strategy with plain transformers.

    \b
    mpirun -n 4 kvr verify --model /models/mine --dtype bfloat16 --longest 16k
    kvr verify --architectures --only "llama,phi3 longrope above"

    The exit code is 0 only if all of them agree.
    """  # noqa: D301
    options = VerifyOptions(**given)
    if options.architectures:
        names = parse_names(options.only)
        return _verify_architectures(names, options.sample, options.seed, options.table, options.lines)
    from kvr_mpi.cli.launch import guarded
    from kvr_mpi.transport.mpi import connect

    world = connect()

    def work() -> int:
        from kvr_mpi.bench.verify import NEW_TOKENS, does_not_fit
        from kvr_mpi.bench.verify import verify as verify_all
        from kvr_mpi.cli.launch import load_everywhere, open_links
        from kvr_mpi.errors import ConfigError
        from kvr_mpi.prefill.self_check import check_chain
        from kvr_mpi.report.log import Log
        from kvr_mpi.transport import together

        log = Log(world.rank)
        loaded = load_everywhere(world, options.model, options.dtype, options.device)
        links = open_links(world, loaded, options.transport, log)

        def choose() -> list[int]:
            context = loaded.shape.max_tokens
            most = (context or 4096) - NEW_TOKENS
            chosen = sorted({*parse_numbers("--lengths", options.lengths), options.longest or most})
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
        for finding in verify_all(checked, links, chosen, options.seed):
            count, failed = count + 1, failed + (not finding.holds)
            log.root(
                f"{'holds' if finding.holds else 'DIFFERS'}: {finding.tokens} tokens, {finding.strategy}: logits "
                f"{finding.logits_error:.1e}, keys and values {finding.kv_error:.1e} of their spread (allowed "
                f"{finding.allowed:.1e}), greedy tokens {'the same' if finding.same_tokens else 'DIFFERENT'}"
            )
        log.root(f"{count - failed} of {count} hold on {world.size} rank(s)")
        return EXIT_DIFFERS if failed else 0

    return guarded(world, work)


def _verify_architectures(
    only: list[str], sample: int | None, seed: int, table: Path | None, lines: IO[str] | None
) -> int:
    """Judge entries of the catalogue, by processes without MPI."""
    import datetime
    import os
    from importlib.metadata import version

    from kvr_mpi.bench.architectures import BAD, CLASSES, catalogue, choose
    from kvr_mpi.bench.catalogue_table import render
    from kvr_mpi.bench.survey import survey

    entries = catalogue()
    names = choose(entries, only, sample, seed)
    if table is not None:  # before minutes have gone by
        table.parent.mkdir(parents=True, exist_ok=True)
        table.touch()
    verdicts = []
    for verdict in survey(entries, names, processes=min(os.cpu_count() or 1, 8, len(names))):
        verdicts.append(verdict)
        click.echo(f"{verdict.kind}: {verdict.name}{': ' + ' '.join(verdict.reason.split()) if verdict.reason else ''}")
        if lines is not None:
            lines.write(verdict.as_json() + "\n")
            lines.flush()
    counts = {kind: sum(verdict.kind == kind for verdict in verdicts) for kind in CLASSES}
    click.echo(f"of {len(verdicts)}: {', '.join(f'{count} {kind}' for kind, count in counts.items() if count)}")
    if table is not None:
        versions = ", ".join(f"{name} {version(name)}" for name in ("kvr-mpi", "transformers", "torch"))
        table.write_text(render(entries, verdicts, versions, datetime.date.today()))
    return EXIT_DIFFERS if any(verdict.kind in BAD for verdict in verdicts) else 0
