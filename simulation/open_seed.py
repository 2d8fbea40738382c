"""The seed of what is no secret in a run whose other seeds are stored nowhere.

It decides the initial model, and the order of examples where clients' own models are
made to be evaluated; neither noise nor cohorts. A run keeps it in its folder, so that
these stay the same when it goes on, or is looked at once more.
"""

import pathlib

from simulation import run_folder, seeds

NAME = "open_seed.json"
_SEED = "seed"


def read(folder: pathlib.Path) -> seeds.RootSeed | None:
    """Returns the root that a folder's run keeps, None where there is none.

    Raises:
        RunFolderError: If it cannot be read.
    """
    file = folder / NAME
    content = run_folder.read_json(file)
    if content is None:
        return None
    try:
        return seeds.RootSeed(int(content[_SEED], 16), reproducible=False)
    except (ValueError, KeyError, TypeError) as error:
        raise run_folder.RunFolderError(f"cannot read {file}: {error!r}") from None


def write(folder: pathlib.Path, root: seeds.RootSeed) -> None:
    """Keeps a root in a run's folder."""
    content = {
        _SEED: f"{root.value:x}",
        "decides": "the initial model, and the order of examples in evaluations; "
        "neither noise nor cohorts",
    }
    run_folder.write_json(folder / NAME, content)
