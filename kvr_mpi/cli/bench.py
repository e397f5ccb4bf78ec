"""``kvr bench``: strategies side by side."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from kvr_mpi.cli.options import command, model_options, parse_names, parse_numbers, plot_option, transport_option
from kvr_mpi.cli.writing import check_writable

if TYPE_CHECKING:
    from kvr_mpi.bench.pairs import Patience
    from kvr_mpi.bench.rivals import Rival
    from kvr_mpi.transport import Transport

# The longest prompt that an engine keeps room for while it answers a corpus, and how many it may have at work at once.
ENGINE_TOKENS, ENGINE_PROMPTS = 8192, 8
# All ranks decode together, and what they would have chosen is forecast; nothing is stored.
SHARING = ("parallel.ranks_per_chain=all", "parallel.ranks_per_stage=1", "decode.mode=auto", "output.kv=false")
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def _percent(context: click.Context, option: click.Parameter, text: str | None) -> float | None:
    """Read ``3%`` as 0.03."""
    if text is None:
        return None
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not 0.0 < share < 1.0:
        raise click.BadParameter(f"{text!r}; expected a share such as 3%", context, option)
    return share


def _seconds(context: click.Context, option: click.Parameter, text: str | None) -> float | None:
    """Read ``90``, ``90s``, ``20m`` or ``2h`` as seconds."""
    if text is None:
        return None
    word = text.strip()
    number, unit = (word[:-1], word[-1]) if word[-1:] in SECONDS else (word, "s")
    try:
        seconds = float(number) * SECONDS[unit]
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < float("inf"):
        raise click.BadParameter(f"{text!r}; expected a time such as 90s, 20m or 2h", context, option)
    return seconds


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Arguments of ``kvr bench``, as described in its help."""

    model: str
    dtype: str | None
    device: str
    strategies: str
    contexts: str
    transport: str
    repeats: int
    until: float | None
    time_limit: float | None
    rivals: str
    rivals_folder: Path
    slices: tuple[str, ...]
    lend: bool
    kernels: str
    roofline: bool
    job: Path | None
    fairkv: Path | None
    budgets: str
    documents: int
    settings: tuple[str, ...]
    ways: str
    batch_size: int
    json_file: Path | None
    plot: Path | None

    @property
    def patience(self) -> Patience:
        """How long to measure."""
        from kvr_mpi.bench.pairs import Patience

        return Patience(self.repeats, self.until, self.time_limit)


@command()
@model_options(dtype=None)
@click.option(
    "--strategies",
    default="single,tsp-dense,tsp-causal,ring,kvr-e,kvr-s,kvr-p",
    show_default=True,
    help="Strategies to run: kvr-e uses even slices, kvr-s searched ones, kvr-p interpolated ones.",
)
@click.option("--contexts", default="1024,2048,4096", show_default=True, help="Prompt lengths in tokens.")
@transport_option
@click.option(
    "--repeats",
    default=5,
    show_default=True,
    type=click.IntRange(1),
    help="Minimum number of pairs of runs of each strategy with ours; fewer than 5 never count as significant.",
)
@click.option(
    "--until",
    callback=_percent,
    metavar="PERCENT",
    help="Repeat until the confidence interval of each ratio is within this of its median, such as 3%.",
)
@click.option(
    "--rivals",
    default="",
    metavar="NAMES",
    help="Other engines to compare with, which use all cores: openvino, llama.cpp; `make rivals` installs them.",
)
@click.option(
    "--rivals-folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=".rivals",
    show_default=True,
    help="Folder with the engines' Python environments, each named after its engine.",
)
@click.option("--time-limit", callback=_seconds, metavar="TIME", help="Start no new pair after this time, such as 20m.")
@click.option(
    "--slices",
    multiple=True,
    metavar="TOKENS=A+B+...",
    help="Slices of kvr-s for a prompt length, instead of a search; may be repeated for other lengths.",
)
@click.option(
    "--lend",
    is_flag=True,
    help="Run tsp and ring with our optimisations, too: kernels chosen for the processor and, except for tsp-dense, a "
    "last layer that computes only what is read. As published they have neither.",
)
@click.option(
    "--kernels",
    type=click.Choice(["measured", "plain"]),
    default="measured",
    show_default=True,
    help="Kernels that ours uses, as model.kernels in a job file; with --batch the job's setting counts.",
)
@click.option(
    "--roofline",
    is_flag=True,
    help="Also measure the peak speed of this processor, and show how close each strategy comes to it.",
)
@click.option(
    "--batch",
    "job",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="JOB.toml",
    help="Instead, compare ways to answer all documents of this job, in documents per hour.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="With --batch or --fairkv: override a setting of the job file.",
)
@click.option(
    "--fairkv",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="JOB.toml",
    help="Instead, compare ways to decode documents of this job, compressed as its [compress] says: KV heads placed on "
    "the ranks in several ways, and each rank its own documents.",
)
@click.option(
    "--budgets",
    default="",
    metavar="TOKENS,...",
    help="With --fairkv: tokens that a KV head keeps on average, one after the other; default: the job's.",
)
@click.option(
    "--documents",
    default=8,
    show_default=True,
    type=click.IntRange(1),
    help="With --fairkv: number of documents, spread over the corpus.",
)
@click.option(
    "--ways",
    default="auto,chains,data-parallel,generate,padded",
    show_default=True,
    help="With --batch: the ways to run. auto: chains as planned; chains: one chain of all ranks; data-parallel: each "
    "rank alone; generate: transformers' generate, one prompt at a time; padded: generate in padded batches.",
)
@click.option(
    "--batch-size",
    default=4,
    show_default=True,
    type=click.IntRange(1),
    help="With --batch: number of prompts in a padded batch.",
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the rows as JSON.")
@plot_option
def bench(**given: Any) -> int:
    """Time the strategies side by side: seconds to the first token for each length, or documents per hour.

    \b
    mpirun -n 2 kvr bench --contexts 4096,8192 --repeats 5 --json bench.json
    mpirun -n 2 kvr bench --strategies kvr-s,ring --until 3% --time-limit 20m
    mpirun -n 2 kvr bench --contexts 4096 --rivals openvino --roofline
    mpirun -n 2 kvr bench --batch jobs/demo.toml --repeats 1
    mpirun -n 2 kvr bench --fairkv jobs/demo.toml --set compress.method=ada-snapkv --set compress.budget=512

    single is plain transformers on all cores of a host; tsp-dense, tsp-causal and ring are published alternatives. Each
    is run back to back with ours (kvr-s, or else kvr-p or kvr-e), in alternating order. The table shows the median
    ratio of these pairs with a 95 % bootstrap interval, 3 % wider on both sides for what another start of the same
    command changes: on a shared machine, speed drifts more within minutes than the strategies differ.
    """  # noqa: D301
    options = BenchOptions(**given)
    from kvr_mpi.cli.launch import guarded
    from kvr_mpi.transport.mpi import connect

    world = connect()
    if options.fairkv is not None:
        return guarded(world, lambda: _bench_heads(world, options, cast(Path, options.fairkv)))
    if options.job is not None:
        return guarded(world, lambda: _bench_batch(world, options))

    def work() -> int:
        from kvr_mpi.bench.prompts import Contest
        from kvr_mpi.bench.prompts import bench as run_bench
        from kvr_mpi.bench.roofline import measure_rooflines
        from kvr_mpi.cli.bench_tables import print_rooflines, print_strategies
        from kvr_mpi.cli.launch import default_dtype, load_everywhere, open_links
        from kvr_mpi.report.log import Log
        from kvr_mpi.transport import on_root, together

        log = Log(world.rank)
        on_root(world, lambda: check_writable(options.json_file, options.plot))
        names = parse_names(options.strategies)
        lengths = together(world, lambda: parse_numbers("--contexts", options.contexts))
        given = together(world, lambda: _parse_slices(options.slices))
        dtype = options.dtype or default_dtype(options.device)
        loaded = load_everywhere(world, options.model, dtype, options.device, kernels=options.kernels, say=log.root)
        links = open_links(world, loaded, options.transport, log)
        contest = Contest(names, lengths, options.patience, given, options.lend)
        with ExitStack() as stack:
            rivals = _open_rivals(stack, world, options, options.model, max(lengths) + 1)
            rows = run_bench(loaded, links, contest, log.root, rivals)
        found = [row.as_json(rows) for row in rows] if world.rank == 0 else []
        if world.rank == 0:
            print_strategies(found, options.json_file, options.plot)
        if options.roofline:  # minutes more: what was measured so far is shown and written already
            rooflines = measure_rooflines(loaded, links, lengths)
            if world.rank == 0:
                print_rooflines(rooflines, found, options.json_file)
        return 0

    return guarded(world, work)


def _open_rivals(
    stack: ExitStack, world: Transport, options: BenchOptions, model: str, longest: int, at_once: int = 1
) -> dict[str, Rival | None]:
    """Start other engines beside the first rank."""
    from kvr_mpi.bench.half_weights import half_gguf
    from kvr_mpi.bench.rivals import open_rival
    from kvr_mpi.cli.environment import read_environment
    from kvr_mpi.model import find_model
    from kvr_mpi.transport import on_root

    def start(name: str) -> Rival:
        path = find_model(model).path
        if path.suffix == ".gguf":
            path = half_gguf(path, read_environment().machine.cache_dir)
        return stack.enter_context(open_rival(name, path, longest, options.rivals_folder, at_once))

    return {name: on_root(world, partial(start, name)) for name in parse_names(options.rivals)}


def _bench_batch(world: Transport, options: BenchOptions) -> int:
    from dataclasses import replace

    from kvr_mpi.bench.corpus import Comparison, bench_corpus, check_ways
    from kvr_mpi.cli.bench_tables import print_corpus
    from kvr_mpi.cli.environment import read_environment
    from kvr_mpi.cli.launch import quiet_libraries
    from kvr_mpi.documents import Corpus
    from kvr_mpi.job import JobSpec, load_job
    from kvr_mpi.model import choose_device
    from kvr_mpi.report.log import Log
    from kvr_mpi.runtime.batch import scan_documents
    from kvr_mpi.transport import on_root, share_json, together
    from kvr_mpi.transport.choose import Name, open_transport

    path = options.job
    assert path is not None, "--batch"
    log, machine = Log(world.rank), read_environment().machine
    quiet_libraries()
    on_root(world, lambda: check_writable(options.json_file))
    spec = JobSpec.model_validate_json(
        share_json(world, on_root(world, lambda: load_job(path, options.settings)[0].model_dump_json()))
    )
    corpus = Corpus.from_json(share_json(world, on_root(world, lambda: scan_documents(spec).to_json())))
    corpus = replace(corpus, entries=tuple(corpus.entries[number] for number in corpus.share(spec.documents.share)))
    device = together(world, lambda: choose_device(spec.model.device, world.local_rank))
    links, reason = open_transport(world, cast(Name, options.transport), device, cache_dir=machine.cache_dir)
    log.root(reason)
    comparison = Comparison(parse_names(options.ways), options.patience, options.batch_size)
    together(world, lambda: check_ways(spec, corpus, comparison.ways, parse_names(options.rivals)))
    with ExitStack() as stack:
        longest = ENGINE_TOKENS + spec.generation.max_new_tokens
        rivals = _open_rivals(stack, world, options, spec.model.path, longest, ENGINE_PROMPTS)
        rows = bench_corpus(spec, machine, corpus, world, links, comparison, log, rivals)
    if world.rank == 0:
        print_corpus([row.as_json(rows) for row in rows], options.json_file)
    return 0


def _bench_heads(world: Transport, options: BenchOptions, path: Path) -> int:
    from kvr_mpi.bench.shared_heads import bench_heads, check_heads
    from kvr_mpi.cli.bench_tables import print_heads
    from kvr_mpi.cli.environment import is_offline, read_environment
    from kvr_mpi.cli.launch import quiet_libraries
    from kvr_mpi.documents import Corpus
    from kvr_mpi.job import JobSpec, load_job
    from kvr_mpi.model import choose_device
    from kvr_mpi.preflight.checks import check_job
    from kvr_mpi.report.log import Log
    from kvr_mpi.runtime.batch import scan_documents
    from kvr_mpi.transport import on_root, share_json, together
    from kvr_mpi.transport.choose import Name, open_transport

    def read() -> list[Any]:
        check_writable(options.json_file)
        spec, _ = load_job(path, (*options.settings, *SHARING))
        check_heads(spec, world.size)
        check_job(spec, world.size, goes_on=True, offline=is_offline())
        numbers = parse_numbers("--budgets", options.budgets) if options.budgets else []
        return [spec.model_dump_json(), numbers, scan_documents(spec).to_json()]

    log, machine = Log(world.rank), read_environment().machine
    quiet_libraries()
    text, budgets, listed = share_json(world, on_root(world, read))
    spec = JobSpec.model_validate_json(text)
    device = together(world, lambda: choose_device(spec.model.device, world.local_rank))
    wanted = cast(Name, options.transport)
    links, reason = open_transport(world, wanted, device, cache_dir=machine.cache_dir, every_pair=True)
    log.root(reason)
    rows = bench_heads(
        spec,
        machine,
        Corpus.from_json(listed),
        links,
        documents=options.documents,
        budgets=budgets,
        patience=options.patience,
        log=log,
    )
    if world.rank == 0:
        print_heads([row.as_json() for row in rows], options.json_file)
    return 0


def _parse_slices(texts: Sequence[str]) -> dict[int, list[int]]:
    from kvr_mpi.errors import ConfigError

    found = {}
    for text in texts:
        tokens, _, lengths = text.partition("=")
        parts = lengths.split("+")
        if not (tokens.isdigit() and all(part.isdigit() for part in parts)):
            raise ConfigError(f"--slices {text!r}: expected TOKENS=A+B+..., such as 4096=2480+1616")
        found[int(tokens)] = [int(part) for part in parts]
    return found
