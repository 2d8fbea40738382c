"""Small idx files, put together without NumPy's byte orders."""

import gzip
import pathlib
import struct

import numpy as np
import numpy.typing as npt


def pack_array(array: npt.ArrayLike, *, code: int, pack: bool = False) -> bytes:
    """Returns the bytes of an idx file."""
    data = struct.pack(">BBBB", 0, 0, code, np.ndim(array))
    data += struct.pack(f">{np.ndim(array)}I", *np.shape(array))
    kind = {0x08: "B", 0x0C: "i", 0x0D: "f"}[code]
    values = np.ravel(array).tolist()
    data += struct.pack(f">{len(values)}{kind}", *values)
    return gzip.compress(data) if pack else data


def write(
    path: pathlib.Path, array: npt.ArrayLike, *, code: int = 0x08, pack: bool = False
) -> pathlib.Path:
    """Writes an idx file. Returns its path."""
    path.write_bytes(pack_array(array, code=code, pack=pack))
    return path
