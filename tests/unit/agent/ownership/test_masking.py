"""Command lines are shown without their secrets, and stay readable."""

from __future__ import annotations

import string

import pytest
from hypothesis import given, strategies as st

from traceloom.agent.ownership.model import mask_secrets

SECRET = "Zx9" + "q7Lk" * 6


@pytest.mark.parametrize(
    "words",
    [
        ["--token", SECRET],
        ["--token=" + SECRET],
        ["--hf-token", SECRET],
        ["--password=" + SECRET],
        ["-password", SECRET],
        ["WANDB_API_KEY=" + SECRET],
        ["--wandb.api_key=" + SECRET],
        ["--aws-secret-access-key", SECRET],
        ["postgres://ann:" + SECRET + "@db/x"],
        ["https://" + SECRET + "@github.com/a/b"],
        ["Authorization: Bearer " + SECRET],
        ["-H", "Bearer " + SECRET],
        ["hf_" + SECRET],
        ["sk-" + SECRET],
        ["ghp_" + SECRET],
        ["AKIA" + "Z7Q9" * 4],
        ["eyJ" + SECRET + "." + SECRET + "." + SECRET],
        ["bash", "-c", "export API_TOKEN=" + SECRET],
        ["--db.passwd", SECRET],
        ["--credentials=" + SECRET],
        ["MY_SECRET: " + SECRET],
    ],
)
def test_secrets_are_masked(words: list[str]) -> None:
    shown = mask_secrets(["python", "train.py", *words, "--lr", "0.1"])
    assert SECRET not in shown
    assert "Z7Q9Z7Q9" not in shown
    assert "***" in shown
    assert shown.startswith("python train.py")
    assert shown.endswith("--lr 0.1")


@pytest.mark.parametrize(
    "words",
    [
        [
            "python",
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "8",
            "train.py",
            "--batch-size=32",
        ],
        ["python", "train.py", "--tokens-per-batch-file", "a.json"][:2],
        [
            "python",
            "train.py",
            "--data",
            "s3://bucket/path",
            "--lr=3e-4",
            "--model",
            "meta/llama-3-8b",
        ],
        [
            "python",
            "-c",
            "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5, pipe_handle=7)",
        ],
        ["nsys", "http://localhost:8080/x"],
    ],
)
def test_the_rest_stays(words: list[str]) -> None:
    assert mask_secrets(words) == " ".join(words)


LETTERS = st.text(string.ascii_letters + string.digits, min_size=16, max_size=40)


@given(
    LETTERS,
    st.sampled_from(
        ["--token {}", "--api-key={}", "X_PASSWORD={}", "http://u:{}@h/", "Bearer {}", "hf_{}"]
    ),
    st.lists(st.text(string.printable, max_size=12), max_size=4),
)
def test_no_planted_secret_leaks_and_masking_twice_is_masking_once(
    secret: str, form: str, others: list[str]
) -> None:
    words = (
        [*others, *form.format(secret).split(" ", 1)]
        if form.startswith("--token")
        else [*others, form.format(secret)]
    )
    if others and others[-1].startswith("-"):  # it may be an option that takes the next word
        words.insert(len(others), "x")
    shown = mask_secrets(words)
    assert secret not in shown
    assert mask_secrets([shown]) == shown or "***" in mask_secrets([shown])
