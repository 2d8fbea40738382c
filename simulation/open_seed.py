"""The seed of what is no secret in a run whose other seeds are stored nowhere.

It decides the initial model, and the order of examples where clients' own models are
made to be evaluated; neither noise nor cohorts. A run keeps it in its folder, so that
these stay the same when it goes on, or is looked at once more.
"""

import json
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
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return seeds.RootSeed(int(content[_SEED], 16), reproducible=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise run_folder.RunFolderError(f"cannot read {file}: {error!r}") from None


def write(folder: pathlib.Path, root: seeds.RootSeed) -> None:
    """Keeps a root in a run's folder."""
    content = {
        _SEED: f"{root.value:x}",
        "decides": "the initial model, and the order of examples in evaluations; "
        "neither noise nor cohorts",
    }
    run_folder.write_json(folder / NAME, content)
