"""`kvr init`: a job that runs as it is, and everything wrong with it said before there is a file."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from constants import Kvr

from kvr_mpi.cli import group
from kvr_mpi.cli.init import _parameters
from kvr_mpi.errors import EXIT_CONFIG, EXIT_OK, EXIT_USAGE
from kvr_mpi.job import load_job

ASKED = 'Which "decisions" were taken?\nAnd C:\\who [by]?'
# What a shell passes on if somebody types a line break as backslash and n.
TYPED = ASKED.replace("\n", r"\n")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a corpus."""
    (tmp_path / "my corpus").mkdir()
    (tmp_path / "my corpus" / "a.txt").write_text("The ferry left at seven.")
    (tmp_path / "rows.jsonl").write_text('{"name": "x", "body": "The ferry left at seven."}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_job_says_what_was_wanted_and_runs(place: Path, tiny_model_dir: Path, run_kvr: Kvr) -> None:
    (place / "my corpus" / "skip.docx").write_text("")
    words = ["init", "minutes.toml", "--corpus", "my corpus", "--model", tiny_model_dir, "--ask", TYPED]
    code, out, err = run_kvr(*words)
    assert (code, err) == (EXIT_OK, "") and "mpirun -n 2 kvr-run minutes.toml" in out and "1 .docx" in out
    # A run of two documents cannot go on with all of them: what is tried out is not where the job will write.
    assert "--set documents.limit=1 --set output.path=runs/minutes-try\n" in out
    active = [line for line in Path("minutes.toml").read_text().splitlines() if line and not line.startswith("#")]
    assert len(active) == 12, "five sections, and a few lines that anyone understands"
    spec, _ = load_job(Path("minutes.toml"), (), {})
    assert spec.documents.path == ["my corpus"] and spec.model.path == str(tiny_model_dir)
    assert spec.prompt.template == f"{{text}}\n\n{ASKED}" and spec.output.path == "runs/minutes"
    code, out, err = run_kvr("plan", "minutes.toml", "--ranks", "2", "--hardware", "h200")
    assert code == EXIT_OK and "a.txt" in out and "1 .docx" in out, err
    before = Path("minutes.toml").read_bytes()
    code, _, err = run_kvr(*words)
    assert code == EXIT_CONFIG and "already exists; choose another name" in err
    assert Path("minutes.toml").read_bytes() == before


def test_documents_that_cannot_be_answered_are_named(place: Path, tiny_model_dir: Path, run_kvr: Kvr) -> None:
    bad = {"nothing.txt": b"", "program.txt": b"\x7fELF" + bytes(range(256)) * 4, "latin.txt": b"Caf\xe9 au lait"}
    for name, content in {**bad, "z.txt": b"The harbour was quiet.", "zz.txt": b"Nobody saw it."}.items():
        (place / "my corpus" / name).write_bytes(content)
    code, out, _ = run_kvr("init", "job.toml", "--corpus", "my corpus", "--model", tiny_model_dir)
    assert code == EXIT_OK and "3 of the first 6 documents cannot be processed" in out
    for name, why in {"nothing.txt": "is empty", "program.txt": "a binary file", "latin.txt": "byte 0xe9"}.items():
        assert any(line.startswith(f"  {name}: ") and why in line for line in out.splitlines()), out
    assert load_job(Path("job.toml"), (), {})[0].output.max_failed == 3
    # The trial has two documents that can be answered, and those between them are no failure.
    assert "try it with 2 documents of the first 5:" in out
    assert "--set documents.limit=5 --set output.path=runs/job-try --set output.max_failed=3\n" in out
    for name in ("a.txt", "z.txt", "zz.txt"):
        (place / "my corpus" / name).unlink()
    code, out, _ = run_kvr("init", "none.toml", "--corpus", "my corpus", "--model", tiny_model_dir)
    assert code == EXIT_OK and "none of these documents can be read" in out and "mpirun" not in out


def test_reasoning_is_switched_off_if_the_chat_template_can(
    place: Path, tiny_model_dir: Path, tmp_path: Path, run_kvr: Kvr
) -> None:
    model = shutil.copytree(tiny_model_dir, tmp_path / "thinks")
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}")
    for name, folder in (("thinks.toml", model), ("plain.toml", tiny_model_dir)):
        assert run_kvr("init", name, "--corpus", "rows.jsonl", "--model", folder, "--text-field", "body")[0] == EXIT_OK
    found = [load_job(Path(name), (), {})[0].prompt.template_args for name in ("thinks.toml", "plain.toml")]
    assert found == [{"enable_thinking": False}, {}]


def test_what_is_commented_out_is_valid(place: Path, tiny_model_dir: Path, run_kvr: Kvr) -> None:
    assert run_kvr("init", "--corpus", "rows.jsonl", "--model", tiny_model_dir, "--text-field", "body")[0] == EXIT_OK
    text = Path("job.toml").read_text()
    more, count = re.subn(r"^# ([a-z_]+ = )", r"\1", text, flags=re.MULTILINE)
    Path("job.toml").write_text(more)
    spec, sources = load_job(Path("job.toml"), (), {})
    assert (
        count == 8
        and spec.generation.repetition_penalty == 1.05
        and spec.output.kv
        and spec.generation.temperature == 0.7
        and len(sources) > count
    )


def test_generation_settings_suit_the_model_and_the_question(place: Path, tiny_model_dir: Path, run_kvr: Kvr) -> None:
    words = ["--corpus", "my corpus", "--model", tiny_model_dir]
    assert run_kvr("init", "short.toml", *words, "--ask", "Was the ferry late? Answer yes or no.")[0] == EXIT_OK
    short = load_job(Path("short.toml"), (), {})[0].generation
    assert (short.max_new_tokens, short.repetition_penalty) == (64, 1.05)
    own = place / "own"
    shutil.copytree(tiny_model_dir, own)
    (own / "generation_config.json").write_text('{"repetition_penalty": 1.1}')
    assert (
        run_kvr("init", "long.toml", "--corpus", "my corpus", "--model", own, "--ask", "List all names.")[0] == EXIT_OK
    )
    long = load_job(Path("long.toml"), (), {})[0].generation
    assert (long.max_new_tokens, long.repetition_penalty) == (512, None), "the model's own penalty applies"


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("Qwen/Qwen2.5-0.5B-Instruct", 0.5e9), ("a/SmolLM2-135M-Instruct.Q4_1.gguf", 135e6), ("org/model-7b", 7e9)],
)
def test_the_size_of_a_model_is_in_its_name(name: str, parameters: float) -> None:
    assert _parameters(name) == parameters


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--corpus", "nowhere"], "nowhere"),
        (["--corpus", "my corpus", "--model", "/no/model"], "no such file or folder"),
        (["--corpus", "rows.jsonl"], "documents.text_field = 'text': no text of that name"),
        (["--corpus", "my corpus", "--ask", "Say \x1b[2J"], "cannot be printed"),
        (["--corpus", "my corpus", "--output", "my corpus/a.txt/x"], "is not a folder"),
        (["nowhere/job.toml", "--corpus", "my corpus"], "cannot be written"),
    ],
)
def test_what_cannot_run_is_not_written(
    arguments: list[str], why: str, place: Path, tiny_model_dir: Path, run_kvr: Kvr
) -> None:
    model = [] if "--model" in arguments else ["--model", str(tiny_model_dir)]
    code, out, err = run_kvr("init", *arguments, *model)
    assert code == EXIT_CONFIG and why in err and out == "" and not list(place.rglob("*.toml"))


def test_three_questions_on_a_terminal(place: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = CliRunner().invoke(group, ["init"], input="my corpus\n")
    assert told.exit_code == EXIT_USAGE and "--corpus and --model: required" in told.output
    monkeypatch.setattr("kvr_mpi.cli.init._is_terminal", lambda: True)
    answers = f"nowhere\nmy corpus\n/no/model\n{tiny_model_dir}\nWho was there?\n"
    told = CliRunner().invoke(group, ["init"], input=answers, catch_exceptions=False)
    assert told.exit_code == EXIT_OK and told.output.count("Error: ") == 2, told.output
    assert load_job(Path("job.toml"), (), {})[0].prompt.template == "{text}\n\nWho was there?"
