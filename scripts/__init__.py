"""Programs: `python -m scripts.<name> --help`."""
