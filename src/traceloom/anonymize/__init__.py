"""Sharing: traces rewritten so that nothing in them tells whose they are, and what they are still good for."""

from traceloom.anonymize.key import Key, random_key, read_key
from traceloom.anonymize.policy import Policy, read_policy
from traceloom.anonymize.run import Anonymized, anonymize

__all__ = ["Anonymized", "Key", "Policy", "anonymize", "random_key", "read_key", "read_policy"]
