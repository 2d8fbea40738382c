"""Progress bars: quick where someone watches, a line now and then in a log."""

import contextlib
import contextvars
import sys
from collections.abc import Iterator

import tqdm

_is_hidden = contextvars.ContextVar("is_hidden", default=False)


@contextlib.contextmanager
def hide_progress() -> Iterator[None]:
    """Shows no bar inside the block."""
    token = _is_hidden.set(True)
    try:
        yield
    finally:
        _is_hidden.reset(token)


@contextlib.contextmanager
def show_progress(
    label: str,
    done: int,
    total: int,
    *,
    unit: str,
    terminal_seconds: float = 0.1,
    log_seconds: float = 10.0,
) -> Iterator[tqdm.tqdm]:
    """Shows a bar inside the block.

    Args:
        label: What is done.
        done: How much of it was done before.
        total: How much there is.
        unit: What is counted.
        terminal_seconds: The least time between redraws on a terminal.
        log_seconds: The least time between lines where the output goes to a file.
    """
    with tqdm.tqdm(
        desc=label,
        total=total,
        initial=done,
        unit=unit,
        mininterval=terminal_seconds if sys.stderr.isatty() else log_seconds,
        dynamic_ncols=True,
        disable=_is_hidden.get(),
    ) as bar:
        yield bar
