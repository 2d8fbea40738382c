"""What goes wrong with an engine itself."""


class EngineError(RuntimeError):
    """An engine could not start, or it died."""
