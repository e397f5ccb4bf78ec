"""``kvr search``: measures the best slices, or how many tokens each KV head keeps, and writes a file."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvr_mpi.cli.options import command, optional_job_argument, overwrite_file_option, parse_numbers, set_option

if TYPE_CHECKING:
    from kvr_mpi.costs.layer_costs import Costs
    from kvr_mpi.tuning.table import TableKey

# Default number of documents for --heads; documents.limit overrides it.
SAMPLED = 8


@command()
@optional_job_argument
@set_option
@click.option("--contexts", default="1k,2k,4k,8k", show_default=True, help="Prompt lengths in tokens.")
@click.option(
    "--output",
    default="tables",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder or .json file to write.",
)
@click.option(
    "--heads",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Instead, prefill a sample of the documents of JOB on one rank, and write the tokens kept by each KV head.",
)
@overwrite_file_option
def search(
    job: Path | None,
    settings: tuple[str, ...],
    contexts: str,
    output: Path,
    heads: Path | None,
    overwrite: bool,
) -> int:
    """Find the fastest slices for given prompt lengths on this machine; write tables/MODEL_HARDWARE_pN.json.

    \b
    mpirun -n 2 kvr search jobs/summarize.toml --contexts 1k,2k,4k,8k
    kvr search jobs/summarize.toml --heads heads.json --set compress.method=ada-snapkv --set compress.budget=512

    JOB names the model and the transport; without it, a small model in float32 is used. A job uses the table with
    parallel.partition = "tables/".

    compress.method = "headkv" uses the profile that --heads writes: the mean over 8 documents of the corpus, or
    documents.limit of them. The command also prints how similar the documents are; use the mean-centered cosines, since
    plain cosines are always close to 1.
    """  # noqa: D301
    if heads is not None:
        if job is None:
            raise click.UsageError("--heads FILE requires a JOB, whose documents are sampled")
        _measure_heads(job, settings, heads, overwrite)
        return 0
    from kvr_mpi.cli.environment import configure_libraries
    from kvr_mpi.cli.launch import run_guarded
    from kvr_mpi.transport.mpi import connect

    configure_libraries()
    world = connect()
    size = world.size

    def work() -> int:
        import torch

        from kvr_mpi.cli.launch import open_model_job
        from kvr_mpi.logs import RankLogger
        from kvr_mpi.prefill.self_check import check_chain
        from kvr_mpi.transport import on_root, together
        from kvr_mpi.transport.mpi_query import library_version
        from kvr_mpi.tuning.cores import pinned
        from kvr_mpi.tuning.identity import provenance_of, table_key
        from kvr_mpi.tuning.measure import follow_measurements, leading, measure_costs
        from kvr_mpi.tuning.table import save_table
        from kvr_mpi.tuning.tabulate import check_contexts, tabulate

        logger = RankLogger(world.rank)
        asked = together(world, lambda: check_contexts(parse_numbers("--contexts", contexts), size, None))
        loaded, chain = open_model_job(world, job, settings, logger)
        lengths = together(world, lambda: check_contexts(asked, size, loaded.shape.max_tokens))
        loaded = check_chain(loaded)
        threads = torch.get_num_threads()  # the same number as in a job
        with pinned(chain):
            torch.set_num_threads(threads)
            key = table_key(loaded, chain)
            provenance = provenance_of(chain, shlex.join(["kvr", *sys.argv[1:]]), library_version())
            target = on_root(world, lambda: _target(output, key, overwrite))
            costs = measure_costs(loaded, chain)
            if target is None:
                follow_measurements(loaded, chain)
                return 0
            logger.root.info(f"{size} ranks of {key.device}; {_describe_costs(costs)}")
            with leading(loaded, chain) as run:
                for table in tabulate(lengths, costs, key, provenance, run, logger.root):
                    save_table(table, target)
                logger.root.info(f"fitted: {_describe_costs(table.rates)}")
                searched = ", ".join(str(entry.context_tokens) for entry in table.entries)
                logger.root.info(f"{target}: entries for {searched} tokens")
        return 0

    return run_guarded(world, work)


def _target(output: Path, key: TableKey, overwrite: bool) -> Path:
    """Return the file to write, after checking that it can be written."""
    from kvr_mpi.disk import writing
    from kvr_mpi.store.targets import check_file
    from kvr_mpi.tuning.table import table_file

    path = output if output.suffix == ".json" else output / table_file(key)
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    check_file(path, overwrite=overwrite)
    return path


def _describe_costs(costs: Costs) -> str:
    token_s = costs.qkv_token_s + costs.rest_token_s
    return (
        f"per layer {1e6 * token_s:.1f} us per token, {1e9 * costs.pair_s:.2f} ns per query-key pair; link "
        f"{costs.link_bytes_per_s / 1e9:.2f} GB/s, {1e6 * costs.link_latency_s:.1f} us"
    )


def _measure_heads(job: Path, settings: tuple[str, ...], output: Path, overwrite: bool) -> None:
    """Prefill a sample of a job's documents on one rank, and write how many tokens each KV head keeps."""
    import json
    import statistics

    from kvr_mpi.cli.environment import is_offline, read_environment
    from kvr_mpi.cli.log_lines import show_log
    from kvr_mpi.disk import replacing, writing
    from kvr_mpi.job import load_job
    from kvr_mpi.logs import RankLogger
    from kvr_mpi.runtime.checks import check_job
    from kvr_mpi.runtime.head_sample import sample_heads
    from kvr_mpi.store.targets import check_file

    alone = ("parallel.ranks_per_chain=all", "parallel.tensor_parallel=1")  # regardless of the job's settings
    spec, _ = load_job(job, (*settings, *alone))
    check_job(spec, 1, offline=is_offline())
    check_file(output, overwrite=overwrite)
    show_log()
    found, left_out = sample_heads(spec, read_environment(), spec.documents.limit or SAMPLED, RankLogger())
    for name, reason in left_out:
        click.echo(f"skipped: {name}: {reason}", err=True)
    with writing(output), replacing(output) as stream:
        stream.write((json.dumps(found) + "\n").encode())
    layers = found["counts"]
    heads = [count for layer in layers for count in layer]
    click.echo(f"{found['source']}: {len(layers)} layers of {len(layers[0])} KV heads")
    click.echo(f"a head keeps {min(heads):.0f} to {max(heads):.0f} tokens, {statistics.mean(heads):.0f} on average")
    for what, cosines in found["similarity"].items():
        if cosines:
            click.echo(f"{what}: {statistics.mean(cosines):.3f} on average, minimum {min(cosines):.3f}")
    click.echo(f"written to {output}")
