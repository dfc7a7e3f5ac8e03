"""Reading: from files of strangers to traces and sessions."""

from traceloom.read.arguments import arguments
from traceloom.read.kineto import read_kineto
from traceloom.read.loading import Loaded, load, load_inputs, load_runs
from traceloom.read.ranks import Progress

__all__ = ["Loaded", "Progress", "arguments", "load", "load_inputs", "load_runs", "read_kineto"]
