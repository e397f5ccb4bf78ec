"""``kvr plan``: forecasts a job or single prompts, and its node, GPU and core hours; needs no MPI and no weights."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvr_mpi.cli.options import command, grouped, optional_job_argument, parse_numbers, set_option
from kvr_mpi.duration import duration_text
from kvr_mpi.errors import counted, listed

if TYPE_CHECKING:
    from kvr_mpi.job import JobSpec
    from kvr_mpi.runtime.prediction import PlannedJob
    from kvr_mpi.schedule.forecast import Forecast
    from kvr_mpi.schedule.placement import Placement, Schedule

# Plans for half and twice the ranks are shown up to this number: forecasts of longer chains take seconds.
COMPARED_RANKS = 128
SHOWN_ROWS = 20
RANKS_PER_NODE = 4
# Time to start and to load a model from a network file system, which `kvr sbatch` adds to the forecast.
START_S = 600.0

# Options for a node's resources, named as in SLURM.
node_options = grouped(
    click.option(
        "--ntasks-per-node",
        type=click.IntRange(1),
        help="Ranks per node.  [default: the largest divisor of --ranks up to 4, or up to the ranks per host of the "
        "hardware profile]",
    ),
    click.option(
        "--gpus-per-node",
        type=click.IntRange(0),
        help="GPUs per node.  [default: one per rank if the job or the hardware profile uses GPUs, else 0]",
    ),
    click.option(
        "--cpus-per-task",
        type=click.IntRange(1),
        help="Cores per rank.  [default: 1, as in SLURM]",
    ),
)


@command()
@optional_job_argument
@set_option
@click.option(
    "--ranks", type=click.IntRange(1), help="Number of ranks to plan for.  [default: the ranks of this allocation]"
)
@click.option("--tokens", metavar="N,...", help="Forecast prompts of these lengths instead of a job, such as 64k.")
@click.option("--model", help="With --tokens: a named shape (Llama 3.1 8B), a model folder, .gguf file or hub id.")
@click.option(
    "--hardware",
    metavar="NAME_OR_FILE",
    help="Speed of a rank: a hardware profile such as h200, a JSON file with the same keys, or a lookup table or a "
    "folder of tables.  [default: the table of parallel.partition, or the speed of earlier jobs with this model]",
)
@node_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON with every document.")
def plan(
    job: Path | None,
    settings: tuple[str, ...],
    ranks: int | None,
    tokens: str | None,
    model: str | None,
    hardware: str | None,
    as_json: bool,
    **node: int | None,
) -> None:
    """Forecast JOB: which documents run on which ranks, when and for how long, and why.

    \b
    kvr plan jobs/summarize.toml --ranks 64 --hardware h200
    kvr plan --tokens 64k --model "Llama 3.1 8B" --hardware h200 --ranks 8

    With --tokens, print the time to first token on 1 to --ranks ranks.

    Chains are as long as parallel.ranks_per_chain says. With "auto", a job follows such a plan, based on costs measured
    on its own ranks. With parallel.tensor_parallel = n, the plan is for groups of n ranks.
    """  # noqa: D301
    from kvr_mpi.documents import describe_others
    from kvr_mpi.errors import ConfigError
    from kvr_mpi.job import load_job
    from kvr_mpi.transport.mpi import launched_size

    if (job is None) == (tokens is None):
        raise click.UsageError("give either a job file, or --tokens and --model")
    count = ranks or (launched_size(os.environ) or ("", 0))[1]
    if job is None:
        if model is None or not count:
            raise click.UsageError("--tokens requires --model and --ranks, such as --model 'Llama 3.1 8B' --ranks 8")
        _plan_prompts(parse_numbers("--tokens", str(tokens)), model, hardware, count, as_json=as_json)
        return
    spec, _ = load_job(job, settings)
    if not count:
        raise ConfigError("the number of ranks is unknown outside an allocation: specify it, such as --ranks 8")
    nodes = allocation_of(spec, count, hardware, **node)
    made = plan_here(spec, count, hardware)
    found, forecast, outline = made.schedule, made.forecast, made.outline
    if as_json:
        summary = {
            **{name: value for name, value in asdict(found).items() if isinstance(value, int | float)},
            "data_parallel_s": found.data_parallel_s,
            "fixed_s": {str(length): seconds for length, seconds in found.fixed_s},
            "documents": [_columns(place, forecast) for place in found.placements],
            "misfits": [{"id": name, "tokens": tokens, "reason": why} for name, tokens, why in found.does_not_fit],
            "costs": forecast.source,
            "cache": "whole" if forecast.rolling is None else forecast.rolling.name,
            "tensor_parallel": made.tensor_parallel,
            "nodes": nodes.nodes,
            **nodes.used(found.makespan_s),
            "expected": None if made.expected is None else asdict(made.expected),
            "other_files": made.others,
            "kv_bytes": made.kv_bytes,
            "errors": made.errors,
        }
        click.echo(json.dumps(summary, indent=1))
        return
    click.echo(f"model      {outline.name} ({outline.shape.architecture}, {str(outline.dtype).removeprefix('torch.')})")
    click.echo(f"costs      {forecast.source}")
    if forecast.rolling is not None:
        click.echo(f"cache      {forecast.rolling.name}")
    click.echo(f"corpus     {len(made.texts):,} documents, {made.counted}")
    if made.others:
        click.echo(f"           {describe_others(made.others)}")
    click.echo("")
    if made.tensor_parallel > 1:
        click.echo(
            f"each rank below is a tensor-parallel group of {made.tensor_parallel} ranks; total: {made.ranks} ranks\n"
        )
    _print_rows(found, forecast)
    _print_summary(made)
    if stored := made.describe_stored():
        click.echo(stored)
    click.echo(f"cost: {nodes.hours(found.makespan_s)} on {counted(nodes.nodes, 'node')}")
    if made.expected is None:
        click.echo(f"not included: startup and loading the model; kvr sbatch adds {duration_text(START_S)}")
    else:
        click.echo(f"expected: {made.expected}")


def _plan_prompts(contexts: list[int], model: str, hardware: str | None, ranks: int, *, as_json: bool) -> None:
    """Print forecasts of prompts on 1, 2, 4, ... ranks, and on all of them."""
    from kvr_mpi.cli.environment import is_offline
    from kvr_mpi.report.table import print_table
    from kvr_mpi.schedule.simulate import costs_on, simulate

    work, profile, costs = costs_on(model, hardware, None, is_offline)
    counts = sorted({ranks, *(1 << power for power in range(ranks.bit_length()))})
    rows = simulate(work, costs, contexts, counts)
    if as_json:
        about = {"model": work.name, "hardware": profile.name}
        click.echo(json.dumps(about | {"rows": [row.as_json() for row in rows]}, indent=1))
        return
    click.echo(f"{work.name} on {profile.name} ({profile.source})")
    click.echo(f"link bandwidth {costs.link_bytes_per_s / 1e9:g} GB/s; forecast, not measured\n")
    columns = ("tokens", "ranks", "first token", "efficiency", "slices")
    shown = [
        (
            f"{row.context_tokens:,}",
            str(row.ranks),
            f"{row.ttft_s:.3g} s",
            f"{row.efficiency:.2f}",
            "+".join(str(end - start) for start, end in zip(row.slices, row.slices[1:], strict=False)),
        )
        for row in rows
    ]
    print_table(columns, shown)
    click.echo("\nfirst token: with the best slices; efficiency: speedup divided by the number of ranks")


def plan_here(spec: JobSpec, ranks: int, hardware: str | None) -> PlannedJob:
    """Plan a job for this number of ranks."""
    from kvr_mpi.cli.environment import read_environment
    from kvr_mpi.cli.log_lines import quiet_libraries, show_log
    from kvr_mpi.runtime.prediction import plan_job

    show_log()
    quiet_libraries()
    return plan_job(spec, read_environment(), ranks, hardware)


def _columns(place: Placement, forecast: Forecast) -> dict[str, Any]:
    """Return the plan of one document."""
    prompts = forecast.parts(place.tokens) if place.tokens else []
    ranks = place.ranks if prompts and place.ranks <= prompts[0] else 1
    return {
        "id": place.id,
        "tokens": place.tokens,
        "prompts": len(prompts),
        "ranks": place.ranks,
        "first_rank": place.first_rank,
        "slices": list(forecast.slices(prompts[0], ranks).bounds) if prompts else [],
        "chunk_tokens": forecast.chunks_for(prompts[0], ranks) if prompts else None,
        "start_s": place.start_s,
        "end_s": place.end_s,
        "ttft_s": forecast.ttft_s(prompts[0], ranks) if prompts else None,
        "memory_bytes": forecast.memory(place.tokens, place.ranks) if prompts else None,
        "reason": place.reason,
    }


def _print_rows(found: Schedule, forecast: Forecast) -> None:
    import shutil

    from rich.text import Text

    from kvr_mpi.errors import printable
    from kvr_mpi.report.table import documents_table, open_console

    table = documents_table(("tokens", "on ranks", "slices", "start", "first token", "end", "memory"))
    table.add_column("reason", overflow="fold", ratio=1)
    rows = sorted(found.placements, key=lambda place: (place.start_s, place.first_rank))
    for place in rows[:SHOWN_ROWS]:
        row = _columns(place, forecast)
        lengths = [str(b - a) for a, b in zip(row["slices"], row["slices"][1:], strict=False)]
        slices = "+".join(lengths if len(lengths) <= 4 else [*lengths[:2], "...", lengths[-1]])
        chunked = "" if row["chunk_tokens"] is None else f"; in chunks of {row['chunk_tokens']:,} tokens"
        last = place.first_rank + place.ranks - 1
        table.add_row(
            Text(printable(place.id)),
            f"{place.tokens:,}",
            str(last) if place.ranks == 1 else f"{place.first_rank}-{last}",
            slices if row["prompts"] < 2 else f"{row['prompts']} prompts",
            duration_text(place.start_s),
            "" if row["ttft_s"] is None else duration_text(row["ttft_s"]),
            duration_text(place.end_s),
            "" if row["memory_bytes"] is None else f"{row['memory_bytes'] / 1e9:.1f} GB",
            Text(place.reason + chunked),
        )
    open_console(max(120, shutil.get_terminal_size((150, 24)).columns)).print(table)
    if len(rows) > SHOWN_ROWS:
        click.echo(f"... and {len(rows) - SHOWN_ROWS:,} more; --json prints all")
    for name, _, why in found.does_not_fit:
        click.echo(f"does not fit in memory: {printable(name)}: {why}")


def _print_summary(made: PlannedJob) -> None:
    """Print the makespan and its alternatives: the bound, other plans, the job as written, other numbers of ranks."""
    from kvr_mpi.schedule.assignment import describe_schedule, plan_documents

    spec, found, forecast, texts = made.spec, made.schedule, made.forecast, made.texts
    click.echo("")
    for line in describe_schedule(found):
        click.echo(line)
    prefill_s = plan_documents(spec, texts, found.ranks, replace(forecast, new_tokens=1)).makespan_s
    if 2 * prefill_s < found.makespan_s:
        share, floor = 100 - 100 * prefill_s / found.makespan_s, duration_text(forecast.answer_s)
        click.echo(
            f"{share:.0f}% of the time is spent on answers of {forecast.new_tokens:,} tokens, which take at least "
            f"{floor} on any number of ranks; lower generation.max_new_tokens for a faster job"
        )
    if made.errors:
        click.echo(f"{counted(len(made.errors), 'document')} cannot be processed:")
        click.echo(listed(made.errors))
    if forecast.more or forecast.apart:
        saved_s = sum(forecast.saved_s(place.tokens, place.ranks) for place in found.placements)
        prompts = f"{1 + len(forecast.more) + forecast.apart} prompts per document"
        apart = f"; {counted(forecast.apart, 'prompt')} prefilled separately" if forecast.apart else ""
        click.echo(f"{prompts}: a shared prefill saves {duration_text(saved_s)} on its ranks{apart}")
    others = [count for count in (found.ranks // 2, found.ranks * 2) if 0 < count <= COMPARED_RANKS]
    times = [(count, plan_documents(spec, texts, count, forecast).makespan_s) for count in others]
    times.append((found.ranks, found.makespan_s))
    hours = {count: count * made.tensor_parallel * seconds / 3600 for count, seconds in times}
    shown = {count: f"{spent:.2g}" if spent < 10 else f"{spent:.0f}" for count, spent in hours.items()}
    costs = [f"{count}: {duration_text(seconds)} ({shown[count]} rank-hours)" for count, seconds in sorted(times)]
    click.echo("time by number of ranks: " + "; ".join(costs))
    if not spec.planned and spec.takes_chains:
        can_plan = made.tensor_parallel == 1 and not spec.prompts
        if made.written_s is None:
            instead = "; with 'auto' it follows the plan above" if can_plan else ""
            click.echo(
                f"ranks_per_chain = {spec.ranks_per_chain!r} is impossible: a document does not fit, or chains of this "
                f"length do not divide the ranks{instead}"
            )
        elif can_plan:
            parallel = spec.parallel.model_copy(update={"ranks_per_chain": "auto"})
            planned = spec.model_copy(update={"parallel": parallel})
            seconds = plan_documents(planned, texts, found.ranks, forecast).makespan_s
            click.echo(
                f"planned for ranks_per_chain = {spec.ranks_per_chain!r}, as the job says; 'auto' would take "
                f"{duration_text(seconds)}"
            )


@dataclass(frozen=True, slots=True)
class Allocation:
    """Resources of a whole job."""

    nodes: int
    ranks: int
    gpus: int
    cores: int

    def used(self, seconds: float) -> dict[str, float]:
        """Return node, GPU and core hours of a job that takes `seconds`."""
        hours = seconds / 3600
        return {"node_hours": self.nodes * hours, "gpu_hours": self.gpus * hours, "core_hours": self.cores * hours}

    def hours(self, seconds: float) -> str:
        """Describe the hours of a job that takes `seconds`."""
        words = [
            f"{spent:.2g} {name.replace('_', ' ')}" if spent < 10 else f"{spent:.0f} {name.replace('_', ' ')}"
            for name, spent in self.used(seconds).items()
            if self.gpus or name != "gpu_hours"
        ]
        return ", ".join(words).replace("gpu", "GPU")


def allocation_of(
    spec: JobSpec,
    ranks: int,
    hardware: str | None,
    *,
    ntasks_per_node: int | None,
    gpus_per_node: int | None,
    cpus_per_task: int | None,
) -> Allocation:
    """Return the resources of a job.

    Raises `ConfigError` if the nodes would not all have the same number of ranks, or the hardware does not exist.
    """
    from kvr_mpi.costs.hardware import find_hardware, load_hardware
    from kvr_mpi.errors import ConfigError
    from kvr_mpi.topology import divides

    is_profile = hardware is not None and find_hardware(hardware) is None
    most = load_hardware(hardware).host_ranks if hardware is not None and is_profile else RANKS_PER_NODE
    per_node = ntasks_per_node or max(size for size in range(1, most + 1) if divides(size, ranks))
    if not divides(per_node, ranks):
        raise ConfigError(
            f"--ranks {ranks} --ntasks-per-node {per_node}: expected the same number of ranks on every node"
        )
    nodes = ranks // per_node
    uses_gpus = spec.model.device == "cuda" or (spec.model.device == "auto" and is_profile)  # profiles are of GPUs
    gpus = per_node * uses_gpus if gpus_per_node is None else gpus_per_node
    return Allocation(nodes, ranks, nodes * gpus, ranks * (cpus_per_task or 1))
