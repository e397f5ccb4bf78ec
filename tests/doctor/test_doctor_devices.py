"""GPUs, their allocator and an MPI that knows them: each check on invented facts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_facts import GPU, only, place, statuses

from kvr_mpi.doctor import devices
from kvr_mpi.doctor.facts import DeviceFacts, RankFacts
from kvr_mpi.transport.mpi import connect
from kvr_mpi.transport.mpi_query import cuda_support, describe_mpi, loaded_libraries


@pytest.mark.parametrize(
    ("second", "status", "words"),
    [
        (place(1, device=replace(GPU, index=1, uuid="b")), "ok", "rank 1: GPU 1 of 2 on node1"),
        # Each task sees its own GPU as number 0: other uuids are other GPUs, and the same number elsewhere is too.
        (place(1, device=replace(GPU, uuid="b")), "ok", "rank 1"),
        (place(1, "node2", device=GPU), "ok", "node2"),
        (place(1, device=GPU), "fail", "ranks 0-1 on node1"),
        (place(1), "fail", "rank 1: no GPU, although"),
        (place(1, device=DeviceFacts(error="TimeoutError: asking torch")), "fail", "TimeoutError: asking torch"),
    ],
)
def test_devices(second: RankFacts, status: str, words: str) -> None:
    facts = [place(0, device=GPU), second]
    found = only(devices.check_devices(facts))
    assert found.status == status and words in found.found
    if second.device == GPU:
        assert statuses(devices.check_devices(facts, share_gpu=True)) == ["ok"]


@pytest.mark.parametrize(
    ("device", "status", "words"),
    [
        (DeviceFacts(), "ok", "no GPU"),
        (DeviceFacts(driver=True), "warn", "built without CUDA"),
        (DeviceFacts(driver=True, built="13.0", visible=""), "warn", "hides"),
        (DeviceFacts(driver=True, built="13.0", unusable="the driver is too old"), "fail", "the driver is too old"),
    ],
)
def test_no_gpu(device: DeviceFacts, status: str, words: str) -> None:
    found = only(devices.check_devices([place(0, device=device)]))
    assert found.status == status and words in found.found


ABLE = replace(GPU, capability=(9, 0), total_bytes=80 << 30, free_bytes=79 << 30)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (replace(ABLE, name="A100", total_bytes=40 << 30), "H200 (80 GiB): rank 0, A100 (40 GiB)"),
        (replace(ABLE, capability=(7, 0)), "rank 1: H200 is older than Ampere"),
        (replace(ABLE, free_bytes=20 << 30), "rank 1: other processes use the GPU, 20.0 of 80.0 GiB are free"),
        (replace(ABLE, has_nccl=False), "rank 1: this torch is built without NCCL"),
        (replace(ABLE, module_loading="lazy"), "rank 1: CUDA_MODULE_LOADING=LAZY"),
        (replace(ABLE, loads_directly=False), "rank 1: weights are loaded through host memory"),
        (replace(ABLE, allocator="max_split_size_mb:64, expandable_segments: True"), "rank 1: PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_what_a_gpu_cannot_do(second: DeviceFacts, words: str) -> None:
    found = only(devices.check_abilities([place(0, device=ABLE), place(1, device=second)]))
    assert found.status == "warn" and words in found.found and found.remedy


def test_gpus_that_can_all_it_takes() -> None:
    part = replace(ABLE, name="NVIDIA A100-SXM4-80GB MIG 3g.40gb")
    assert "(MIG)" in only(devices.check_abilities([place(0, device=part), place(1, device=part)])).found
    assert devices.check_abilities([place(0, device=ABLE), place(1, device=ABLE)]) == []
    assert devices.check_abilities([place(0), place(1)]) == [], "no GPU is another check's"


def test_cuda_support() -> None:
    assert cuda_support([], {})[0] is None
    assert cuda_support(["/x/libmpi_cray.so"], {"MPICH_GPU_SUPPORT_ENABLED": "1"})[0] is False
    assert cuda_support(["/x/libmpi_gtl_cuda.so.0"], {"MPICH_GPU_SUPPORT_ENABLED": "1"})[0] is True
    assert cuda_support([], {"I_MPI_OFFLOAD": "1"})[0] is True
    assert cuda_support([], {"I_MPI_OFFLOAD": "0"})[0] is None
    connect({})
    assert loaded_libraries()
    mpi = describe_mpi({})
    assert mpi is not None and mpi.thread_level == "THREAD_MULTIPLE"
    assert mpi.cuda is False and mpi.cuda_why.endswith("says no"), "the wheels' MPIs are built without CUDA"
