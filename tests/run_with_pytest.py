"""Runs test modules with pytest: the main program of every Bazel test."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[1:]))
