"""Found by Python at start-up because `traceloom record` put this directory first on PYTHONPATH.

It costs a process that never imports torch next to nothing: it chains the `sitecustomize` it hides,
takes its own directory off `sys.path`, and waits for `import torch`. It must run on any Python and
never break the program.
"""

# It runs before anything else, on any Python, in anybody's program: plain old Python on purpose.
# ruff: noqa: ANN001, ANN202, BLE001, PTH100, PTH118, PTH120, UP031
# mypy: ignore-errors
import os
import sys


def _run_hidden_sitecustomize(directory):
    """Run the sitecustomize that ours hides, exactly as Python would have done."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != directory]
    try:  # what `importlib` is made of; its Python face costs milliseconds
        from _frozen_importlib import module_from_spec
        from _frozen_importlib_external import PathFinder
    except ImportError:
        from importlib.machinery import PathFinder
        from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


class _TorchFinder:
    """Lets the others find torch, and asks to be called when it has been imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        spec = None
        for finder in list(sys.meta_path):  # those behind this one
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None else None
            if spec is not None:
                break
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return spec
        loader, execute = spec.loader, spec.loader.exec_module

        def exec_module(module):
            del loader.exec_module
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            execute(module)
            _begin()

        # Whoever only asks whether there is a torch (Polars, transformers) gets a spec too, and
        # never runs it.
        loader.exec_module = exec_module
        return spec


def _begin():
    try:
        if sys.version_info < (3, 10):
            version = ".".join(map(str, sys.version_info[:2]))
            message = "traceloom: nothing is recorded: Python 3.10 or newer is needed, this is %s [old-python]"
            sys.stderr.write(message % version + "\n")
            return
        home = os.environ["TRACELOOM_HOME"]
        if "traceloom" not in sys.modules:
            # The recorder that was asked for, even where the program's environment has another one
            # or none.
            from importlib.util import module_from_spec, spec_from_file_location

            spec = spec_from_file_location(
                "traceloom", os.path.join(home, "__init__.py"), submodule_search_locations=[home]
            )
            module = module_from_spec(spec)
            sys.modules["traceloom"] = module
            spec.loader.exec_module(module)
        from traceloom.capture.attach import begin

        begin()
    except Exception as error:
        sys.stderr.write(
            "traceloom: recording did not start, your program goes on: %r [recorder-failed]\n"
            % (error,)
        )


def _install_hook():
    if os.environ.get("TRACELOOM_RECORD"):
        sys.meta_path.insert(0, _TorchFinder())
        marker = os.environ.get("TRACELOOM_MARKER")
        try:
            if marker:
                os.close(os.open(marker, os.O_CREAT | os.O_WRONLY))
        except OSError:
            pass  # Only a diagnosis would have used it.
    _run_hidden_sitecustomize(os.path.dirname(os.path.abspath(__file__)))


_install_hook()
