"""Our kernels for attention and products, compiled once per processor and cached in ``KVR_CACHE``.

Compiling takes a few seconds. If it fails, torch's kernels are used, and the log gives the reason. Later jobs do not
repeat a failed compilation, but every job looks again for a missing compiler.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import xxhash

from kvr_mpi.disk import read_regular, replacing
from kvr_mpi.logs import RankLogger
from kvr_mpi.model.cpu_attention import DTYPES, HALVES, HEADERS, SOURCES, KernelLibrary
from kvr_mpi.model.narrow_product import BLOCK, NarrowWeights
from kvr_mpi.tuning.identity import processor_key

# Time limit for compiling, for busy machines.
LIMIT_S = 300.0
MOST_BYTES = 64 << 20
FAILED, MOST_NOTE_BYTES = "failed.txt", 4096
COMPILERS = ("c++", "g++", "clang++")
NO_COMPILER = f"no compiler found ({', '.join(COMPILERS)}), and CXX is not set"
# FMA contraction does not reorder additions; no option disables NaN.
OPTIONS = "-std=c++17 -O3 -march=native -ffp-contract=fast -fno-math-errno -shared -fPIC -pthread".split()
NOT_COMPILED = "attention kernels not compiled, using torch's attention"
# With AMX, weights are rounded to bfloat16.
ALLOWED_ERROR, ALLOWED_AMX_ERROR = 1e-5, 1e-2
# Test cases (heads, KV heads, queries, keys): full and partial tiles, several blocks of keys, queries at the end of the
# keys and on both sides of a block's end, and one query with one or several pieces of keys, and with panels of heads.
TRIED = ((6, 2, 45, 45), (2, 1, 131, 580), (2, 2, 7, 1100), (4, 1, 13, 531), (56, 2, 1, 1100), (9, 3, 1, 33))
# Test cases of products: a number of outputs that is not a multiple of a tile, and full and partial tiles of rows; for
# panels also more features than a tile takes at a time, and several pieces of rows; for 16 bits both.
TRIED_OUTS, TRIED_ROWS, TRIED_PANELS = 71, (1, 2, 3, 8, 13), ((1, 40), (23, 401), (205, 33))
TRIED_HALVES = (*((count, 96) for count in TRIED_ROWS), (23, 401), (397, 33))


def open_attention(
    cache_dir: Path,
    logger: RankLogger,
    *,
    compiles: bool,
    limit_s: float = LIMIT_S,
    environ: Mapping[str, str] = os.environ,
) -> KernelLibrary | None:
    """Load the kernels; None and a log line if that fails. If `compiles` is set, compile them first if necessary."""
    texts = " ".join(each.read_text() for each in (*SOURCES, *HEADERS))
    options = [*OPTIONS, *(word for word in environ.get("CXX", "").split() if word.startswith("-"))]
    known = f"{processor_key()} {texts} {' '.join(options)}"
    folder = cache_dir / "kernels" / xxhash.xxh3_64_hexdigest(known.encode())
    file = folder / "attention.so"
    if compiles and not file.exists():
        try:
            _compile(file, logger, limit_s)
        except OSError as error:
            logger.warning(f"attention is not compiled: {folder} cannot be written ({error.strerror or error})")
    try:
        check_kept(file)
        library = KernelLibrary(file)
        _try(library)
        _try_products(library)
    except (FileNotFoundError, NotADirectoryError):
        return None  # it was never compiled
    except (OSError, ValueError, AttributeError) as error:
        logger.warning(f"{file} is not used: {str(error).splitlines()[0]}; remove it to compile it again")
        return None
    return library


def _compile(file: Path, logger: RankLogger, limit_s: float) -> None:
    """Compile the kernels into the cache, or log why not; a compiler error is also cached, a timeout is not."""
    compiler = find_compiler()
    if compiler is None:
        logger.info(f"{NOT_COMPILED}: {NO_COMPILER}")
        return
    note = file.parent / FAILED
    if note.exists():
        why = read_regular(note, MOST_NOTE_BYTES).decode(errors="replace").strip()
        logger.info(f"{NOT_COMPILED}: compiling failed before ({why}); remove {note} to try again")
        return
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    work = Path(tempfile.mkdtemp(prefix=".compiling-", dir=file.parent))
    try:
        if why := _compile_together(compiler, work / file.name, limit_s):
            logger.info(f"{NOT_COMPILED}: {why}")
            with replacing(note) as stream:
                stream.write(f"{why}\n".encode())
        else:
            keep_made(work / file.name, file)
    except TimeoutError as error:
        logger.info(f"{NOT_COMPILED}: {error}; the next job tries again")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _compile_together(compiler: str, made: Path, limit_s: float) -> str:
    """Compile all sources at the same time, and link them; return the first error, or an empty string."""
    objects = [made.with_name(f"{source.stem}.o") for source in SOURCES]
    with ThreadPoolExecutor(len(SOURCES)) as pool:
        errors = pool.map(
            lambda source, target: run_compiler(f"{compiler} -c", [source], target, limit_s), SOURCES, objects
        )
        return next(filter(None, errors), "") or run_compiler(compiler, objects, made, limit_s)


def find_compiler(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the command of a C++ compiler; None if there is none."""
    return environ.get("CXX", "").strip() or next(filter(None, map(shutil.which, COMPILERS)), None)


def run_compiler(compiler: str, sources: Sequence[Path], made: Path, limit_s: float = LIMIT_S) -> str:
    """Run a compiler in its own session; return its error, or an empty string; raise `TimeoutError` after `limit_s`."""
    words = compiler.split()  # CXX may contain options, such as another -march
    names_march = any(word.startswith("-march=") for word in words)
    options = [each for each in OPTIONS if not (names_march and each.startswith("-march="))]
    command = [*words, *options, *map(str, sources), "-o", str(made)]
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # so that a hanging compiler can be killed with its children
            )
        except OSError as error:
            return f"{words[0]} cannot be run ({error.strerror or error})"
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the compiler was stopped after {limit_s:.0f} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        lines = [line.strip() for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    if code:
        last = "".join(lines[-1:]) or "without output"
        reason = next((line for line in reversed(lines) if "error" in line.lower()), last)
        return f"the compiler failed ({reason[:300]})"
    return "" if made.is_file() else f"{words[0]} did not create a file"


def keep_made(made: Path, file: Path) -> None:
    """Move a compiled library to its place, with a checksum next to it."""
    made.chmod(0o600)
    with replacing(file.with_suffix(".xxh3")) as stream:
        stream.write(_digest(made).encode())
    made.replace(file)


def check_kept(file: Path) -> None:
    """Check that a library belongs to this user and is complete.

    Raises an `OSError` if it cannot be read, and a `ValueError` if others could have written it, or it is damaged.
    """
    for path in (file.parent, file):
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise ValueError(f"{path} is a link, or others can write to it")
    if _digest(file) != read_regular(file.with_suffix(".xxh3"), 100).decode(errors="replace"):
        raise ValueError("it is damaged")


def _digest(file: Path) -> str:
    return xxhash.xxh3_128_hexdigest(read_regular(file, MOST_BYTES))


@torch.inference_mode()
def _try(library: KernelLibrary) -> None:
    """Compare the attention kernel with float64; raise a `ValueError` if its results differ."""
    dim = 2 * library.multiple
    for heads, kv_heads, queries, count in TRIED:
        draw = torch.Generator().manual_seed(queries)
        tensors = [
            torch.randn(1, rows, number, dim, generator=draw).transpose(1, 2)
            for rows, number in ((queries, heads), (count, kv_heads), (count, kv_heads))
        ]
        for dtype in DTYPES:
            query, keys, values = (each.to(dtype) for each in tensors)
            for causal, window in ((False, None), (True, None), (True, 10)):
                how: Any = {"causal": causal, "window": window}
                truth = _attend_in_float64(query, keys, values, 0.3, **how)
                found = [(library.attend(query, keys, values, 0.3, **how), ALLOWED_ERROR)]
                if library.amx is not None and dtype == torch.bfloat16:
                    found.append((library.amx.attend(query, keys, values, 0.3, **how), ALLOWED_AMX_ERROR))
                for results, error in found:
                    pairs = zip(results, truth, strict=True)
                    if not all(torch.allclose(mine.double(), other, error, error) for mine, other in pairs):
                        raise ValueError("it gives wrong results")


@torch.inference_mode()
def _try_products(library: KernelLibrary) -> None:
    """Compare products with float64, and narrowed weights with their originals, as in `_try`."""
    draw = torch.Generator().manual_seed(0)
    scales = torch.randn(TRIED_OUTS, 3, 2, generator=draw)
    scales[..., 0] = scales[..., 0].abs().half().float()
    halves = torch.randn(TRIED_OUTS, 3 * BLOCK, generator=draw).bfloat16().view(torch.int16)
    steps = torch.randint(0, 256, (TRIED_OUTS, 3 * BLOCK // 2), generator=draw, dtype=torch.uint8)
    steps[:, :: BLOCK // 2] = 15 << 4  # the minimum and the maximum of a block
    bytes_of = torch.randint(-127, 128, (TRIED_OUTS, 3 * BLOCK), generator=draw, dtype=torch.int8)
    bytes_of[:, ::BLOCK] = -127
    kinds = (
        NarrowWeights(halves, torch.empty(TRIED_OUTS, 3, 0)),
        NarrowWeights(bytes_of, scales[..., :1].contiguous()),
        NarrowWeights(steps, scales),
    )
    for weights in kinds:
        wide = weights.widen()
        found, truth = library.narrow(wide), wide.double()
        if found is None or not torch.equal(found.widen().view(torch.int32), wide.view(torch.int32)):
            raise ValueError("it gives wrong results")
        wide.view(torch.int32)[-1, -1] ^= 1
        if library.narrow(wide) is not None:
            raise ValueError("it gives wrong results")
        for count in TRIED_ROWS:
            rows = torch.randn(count, 3 * BLOCK, generator=draw)
            _compare(library.multiply(rows, weights), rows, truth)
    for count, features in TRIED_PANELS:
        rows, weight = (torch.randn(each, features, generator=draw) for each in (count, TRIED_OUTS))
        _compare(library.multiply_panels(rows, library.lay_panels(weight), TRIED_OUTS, None), rows, weight.double())
    for dtype, (count, features) in itertools.product(HALVES, TRIED_HALVES):
        rows, weight = (torch.randn(each, features, generator=draw).to(dtype) for each in (count, TRIED_OUTS))
        _compare(library.multiply_halves(rows, weight, None), rows, weight.double())


def _compare(found: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> None:
    wanted, rounding = rows.double() @ weight.T, 0.0 if found.dtype == torch.float32 else torch.finfo(found.dtype).eps
    allowed = rounding * wanted.abs() + ALLOWED_ERROR * (rows.double().abs() @ weight.abs().T)
    if not bool(((found.double() - wanted).abs() <= allowed).all()):
        raise ValueError("it gives wrong results")


def _attend_in_float64(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, *, causal: bool, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    group = query.shape[1] // keys.shape[1]
    keys, values = (each.double().repeat_interleave(group, dim=1) for each in (keys, values))
    scores = query.double() @ keys.transpose(-1, -2) * scale
    if causal:
        queries, count = scores.shape[-2:]
        distance = torch.arange(count - queries, count).unsqueeze(1) - torch.arange(count)
        scores = scores.masked_fill((distance < 0) | (distance >= (window or count)), float("-inf"))
    return scores.softmax(-1) @ values, scores.logsumexp(-1)
