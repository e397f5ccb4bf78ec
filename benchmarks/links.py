"""Bandwidth of every link of a chain, by the size of a message.

mpirun -n 8 python -m benchmarks links [--sizes 65536,...] [--device cuda] [--transport nccl] [--json FILE]

A link goes from a rank to the next; of several messages the fastest counts. NCCL_MAX_CTAS says on how many of a GPU's
multiprocessors NCCL may run a transfer.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.options import make_parser
from kvr_mpi.cli.options import parse_numbers
from kvr_mpi.runtime.loading import own_device
from kvr_mpi.transport import gather_json, share_json
from kvr_mpi.transport.choose import NAMES, open_transport
from kvr_mpi.transport.links import Effort, measure_links
from kvr_mpi.transport.mpi import connect

# Below this, a link between hosts with one of these networks is suspected of using TCP (NCCL without its plugin).
SLOW_GB_PER_S, LARGE_BYTES = 5.0, 1 << 24
FAST_NETWORKS = {"InfiniBand": Path("/sys/class/infiniband"), "Slingshot": Path("/sys/class/cxi")}
SIZES = [1 << power for power in range(16, 29, 2)]


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = make_parser("links", __doc__)
    parser.add_argument(
        "--sizes", default=",".join(map(str, SIZES)), help="bytes of a message  [default: 64 KiB to 256 MiB]"
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--transport", choices=NAMES, default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args(arguments)
    world = connect()
    if world.size < 2:
        raise SystemExit("start at least two ranks: mpirun -n 2 python -m benchmarks links")
    device = own_device(world, wanted.device)
    transport, reason = open_transport(world, wanted.transport, device)
    rows = []
    for size in parse_numbers("--sizes", wanted.sizes):
        effort = Effort(rounds=10, repeats=wanted.repeats, first_bytes=size, max_bytes=size)
        link = measure_links(transport, device, effort)
        found = gather_json(world, None if link is None else [link.bytes_per_s, link.latency_s, link.intact])
        for rank, (bytes_per_s, latency_s, intact) in enumerate(share_json(world, found)[:-1]):
            rows.append(
                {"bytes": size, "from_rank": rank, "gigabytes_per_s": bytes_per_s / 1e9, "latency_s": latency_s}
            )
            if not intact:
                raise SystemExit(f"{size} bytes from rank {rank} to rank {rank + 1} did not arrive as they were sent")
    networks = [name for name, folder in FAST_NETWORKS.items() if folder.is_dir() and any(folder.iterdir())]
    hosts = gather_json(world, [socket.gethostname(), networks])
    if world.rank:
        return
    limit = os.environ.get("NCCL_MAX_CTAS", "not set")
    print(f"{reason}; NCCL_MAX_CTAS: {limit}\n{'bytes':>12}  slowest   fastest link, GB/s")
    for size in dict.fromkeys(row["bytes"] for row in rows):
        speeds = [float(row["gigabytes_per_s"]) for row in rows if row["bytes"] == size]
        print(f"{size:>12}  {min(speeds):7.2f}  {max(speeds):8.2f}")
    for line in slow_links(rows, hosts):
        print(line)
    if wanted.json is not None:
        wanted.json.write_text(
            json.dumps({"transport": reason, "nccl_max_ctas": limit, "links": rows}, indent=1) + "\n"
        )


def slow_links(rows: Sequence[Mapping[str, Any]], hosts: Sequence[tuple[str, Sequence[str]]]) -> Iterator[str]:
    """Warn of slow links between hosts with a fast network; `hosts` are the name and the networks of each rank's."""
    for row in rows:
        (here, networks), (there, others) = hosts[row["from_rank"]], hosts[row["from_rank"] + 1]
        common = [name for name in networks if name in others]
        if here != there and common and row["bytes"] >= LARGE_BYTES and row["gigabytes_per_s"] < SLOW_GB_PER_S:
            yield (
                f"warning: {row['gigabytes_per_s']:.2f} GB/s from rank {row['from_rank']} on {here} to {there}, but "
                f"both have {common[0]}: without its plugin (aws-ofi-nccl, for Slingshot), NCCL uses TCP; compare "
                f"--transport mpi, and look for NET/Socket with NCCL_DEBUG=INFO"
            )
