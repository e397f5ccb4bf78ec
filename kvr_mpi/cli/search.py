"""``kvr search``: measure the best slices, or how much each KV head keeps, and write that to a file."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import click

from kvr_mpi.cli.options import command, model_options, parse_numbers, set_option, transport_option

if TYPE_CHECKING:
    from kvr_mpi.costs.layer_costs import Costs
    from kvr_mpi.model import LoadedModel
    from kvr_mpi.transport import Transport
    from kvr_mpi.tuning.table import Key, Provenance


@command()
@click.argument("job", required=False, type=click.Path(dir_okay=False, path_type=Path))
@model_options(dtype="float32")
@transport_option
@click.option("--contexts", default="1k,2k,4k,8k", show_default=True, help="Prompt lengths in tokens.")
@click.option(
    "--method",
    type=click.Choice(["refit", "grid", "model"]),
    default="refit",
    show_default=True,
    help="refit: at most 4 instrumented runs per length; grid: the paper's grid search; model: no runs.",
)
@click.option("--max-runs", type=click.IntRange(2), help="Maximum number of runs for one length.")
@click.option("--hardware", help="Name of this machine in the table.  [default: the device's name]")
@click.option("--profile", help="With --method model: a hardware profile (name or file) to use instead of measuring.")
@click.option(
    "--ranks", type=click.IntRange(2), help="With --profile: ranks of the chain.  [default: the ranks started]"
)
@click.option(
    "--output",
    default="tables",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder or .json file to write.",
)
@click.option("--replace", is_flag=True, help="Replace an existing table or profile.")
@click.option(
    "--heads",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Instead, prefill a sample of JOB's documents on one rank, and write how many tokens each KV head keeps.",
)
@set_option
@click.option(
    "--documents",
    default=8,
    show_default=True,
    type=click.IntRange(1),
    help="With --heads: maximum number of documents to sample.",
)
def search(
    job: Path | None,
    model: str,
    dtype: str,
    device: str,
    transport: str,
    contexts: str,
    method: str,
    max_runs: int | None,
    hardware: str | None,
    profile: str | None,
    ranks: int | None,
    output: Path,
    replace: bool,
    heads: Path | None,
    settings: tuple[str, ...],
    documents: int,
) -> int:
    """Find the fastest slices on this machine for given prompt lengths, and write tables/MODEL_HARDWARE_pN.json.

    \b
    mpirun -n 2 kvr search --contexts 1k,2k,4k,8k --output tables/
    kvr search jobs/summarize.toml --heads heads.json --set compress.method=ada-snapkv --set compress.budget=512

    A job uses the table with parallel.partition = "table" and parallel.table = "tables/".

    compress.method = "headkv" and the placement of heads use the profile that --heads writes: the mean over documents.
    The similarity of the documents is printed, too; look at the mean-centred cosines, since plain cosines are always
    close to 1.
    """  # noqa: D301
    if (job is None) != (heads is None):
        raise click.UsageError("JOB and --heads belong together: give both, or neither")
    if job is not None and heads is not None:
        from kvr_mpi.cli.heads import measure_heads

        measure_heads(job, settings, documents, heads, replace=replace)
        return 0
    from kvr_mpi.cli.launch import guarded
    from kvr_mpi.transport.mpi import connect

    if (profile and method != "model") or (ranks and not profile):
        raise click.UsageError("--profile needs --method model, and --ranks needs --profile")
    world = connect()
    size = ranks or world.size

    def work() -> int:
        from kvr_mpi.cli.launch import load_everywhere, open_links
        from kvr_mpi.prefill.self_check import check_chain
        from kvr_mpi.report.log import Log
        from kvr_mpi.transport import on_root, together
        from kvr_mpi.tuning.cores import pinned
        from kvr_mpi.tuning.measure import follow, leading
        from kvr_mpi.tuning.table import check_name, save_table
        from kvr_mpi.tuning.tabulate import Wish, check_contexts, tabulate

        log = Log(world.rank)

        def check_arguments() -> list[int]:
            check_name("--hardware", hardware)
            return check_contexts(parse_numbers("--contexts", contexts), size, None)

        asked = together(world, check_arguments)
        loaded = load_everywhere(world, model, dtype, device)
        lengths = together(world, lambda: check_contexts(asked, size, loaded.shape.max_tokens))
        chain = open_links(world, loaded, transport, log)
        loaded = check_chain(loaded)
        with pinned(chain):
            key, provenance = _who(loaded, chain, hardware, profile, size)
            target = on_root(world, lambda: _target(output, key, replace))
            costs = _costs(loaded, chain, profile)
            if target is None:
                follow(loaded, chain)
                return 0
            log.root(f"{size} ranks of {key.device}; {_say_costs(costs)}")
            with leading(loaded, chain) as run:
                wish = Wish(lengths, cast('Literal["refit", "grid", "model"]', method), max_runs)
                for table in tabulate(wish, costs, key, provenance, run, log.root):
                    save_table(table, target)
                log.root(f"fitted: {_say_costs(table.rates.costs())}")
                searched = ", ".join(str(entry.context_tokens) for entry in table.entries)
                log.root(f"{target}: entries for {searched} tokens")
        return 0

    return guarded(world, work)


def _who(
    loaded: LoadedModel, chain: Transport, hardware: str | None, profile: str | None, size: int
) -> tuple[Key, Provenance]:
    """Say what the table will be of."""
    from kvr_mpi.transport.mpi_query import library_version
    from kvr_mpi.tuning.identity import key_of, provenance_of

    key = key_of(loaded, chain, hardware or (Path(profile).stem if profile else None), size)
    if profile:
        key = key.model_copy(update={"device": f"hardware profile {profile}"})
    return key, provenance_of(chain, shlex.join(["kvr", *sys.argv[1:]]), library_version())


def _target(output: Path, key: Key, replace: bool) -> Path:
    """Find the file, and refuse to spend time on what could not be written in the end."""
    from kvr_mpi.errors import OutputError
    from kvr_mpi.store.targets import check_file
    from kvr_mpi.tuning.table import check_place, file_name

    path = output if output.suffix == ".json" else output / file_name(key)
    if path.exists() and not replace:
        raise OutputError(f"table {str(path)!r} exists already; choose another --hardware or --output, or --replace it")
    check_place(path)
    check_file(path, overwrite=replace)
    return path


def _costs(loaded: LoadedModel, chain: Transport, profile: str | None) -> Costs:
    """Measure, or take a profile's word."""
    from kvr_mpi.costs.hardware import load_hardware
    from kvr_mpi.costs.layer_costs import costs_of
    from kvr_mpi.costs.workload import workload_of
    from kvr_mpi.transport import together
    from kvr_mpi.tuning.measure import measure_costs

    if profile is None:
        return measure_costs(loaded, chain)
    work = workload_of(loaded.model.config, loaded.shape.dtype_bytes)
    return together(chain, lambda: costs_of(work, load_hardware(profile)))


def _say_costs(costs: Costs) -> str:
    token_s = costs.qkv_token_s + costs.rest_token_s
    return (
        f"per layer {1e6 * token_s:.1f} us per token, {1e9 * costs.pair_s:.2f} ns per query-key pair; link "
        f"{costs.link_bytes_per_s / 1e9:.2f} GB/s, {1e6 * costs.link_latency_s:.1f} us"
    )
