"""The policy file and the key: refused with a sentence where they cannot be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from traceloom.errors import InputError, UsageError
from traceloom.workload.anonymize.policy import CHOICES, Policy, read_key, read_policy

PAGE = Path(__file__).resolve().parents[4] / "docs" / "reference" / "anonymize.md"


def test_without_a_file_the_defaults_protect() -> None:
    policy = read_policy(None)
    assert policy == Policy()
    assert {key: getattr(policy, key) for key in CHOICES} == {
        key: choices[0] for key, choices in CHOICES.items()
    }
    assert (policy.names, policy.shapes, policy.scalars) == ("pseudonym", "bucket", "drop")


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('version = 1\nshapes = "drop"\nkeep_names = ["a.*"]\n')
    assert read_policy(path) == Policy(shapes="drop", keep_names=("a.*",))
    assert read_policy(path).with_structure("collapse").structure == "collapse"
    assert read_policy(path).with_structure(None).structure == "keep"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            'shapes = "round"',
            'expected `shapes` to be one of "bucket", "keep", "drop", "fit", got \'round\'',
        ),
        ("shape = 1", "`shape` is no part of a policy"),
        ("keep_names = [1]", "expected `keep_names` to be a list of texts"),
        ('keep_names = ["("]', "is no regular expression"),
        ('format = "other"', "expected the format `traceloom-anonymize-policy`"),
        ("= =", "the policy cannot be read"),
        ("shapes = []", "expected `shapes` to be one of"),
    ],
)
def test_a_policy_that_cannot_be_right_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=r".") as caught:
        read_policy(path)
    assert said in caught.value.message
    assert caught.value.slug == "bad-policy"


def test_a_policy_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text("version = 2")
    with pytest.raises(InputError) as caught:
        read_policy(tmp_path / "policy.toml")
    assert caught.value.slug == "other-version"


def test_a_policy_that_is_not_there_is_refused_plainly(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_policy(tmp_path / "no.toml")
    assert caught.value.message == "the policy cannot be read: no such file or directory"


@pytest.mark.parametrize("name", sorted(CHOICES))
def test_a_choice_that_there_is_not_is_refused_in_programs_too(name: str) -> None:
    for value in CHOICES[name]:
        assert getattr(Policy(**{name: value}), name) == value
    with pytest.raises(
        UsageError, match=f"expected `{name}` to be one of {', '.join(CHOICES[name])}, got 'hide'"
    ):
        Policy(**{name: "hide"})


def test_every_choice_is_documented() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for key, choices in CHOICES.items():
        assert f"| `{key}` | {', '.join(f'`{choice}`' for choice in choices)} |" in page


def test_a_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "secret.key"
    key, fresh = read_key(path)
    again, known = read_key(path)
    assert (fresh, known) == (True, False)
    assert key.letters("x") == again.letters("x")
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_key_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"short")
    with pytest.raises(InputError, match="expected a key of 16"):
        read_key(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_key(tmp_path)
    with pytest.raises(InputError, match="not a directory"):
        read_key(path / "below")
