"""The accounting needs no TensorFlow: it works with every such import blocked."""

import subprocess
import sys
import textwrap

_BLOCKER = """
import sys

class Blocker:
    names = {"tensorflow", "tensorflow_federated", "tensorflow_privacy",
             "tensorflow_probability", "keras", "jax", "jaxlib", "torch"}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ImportError(f"blocked: {name}")
        return None

sys.meta_path.insert(0, Blocker())
"""


def _run(code):
    return subprocess.run(
        [sys.executable, "-c", _BLOCKER + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_accounting_works_without_tensorflow():
    result = _run(
        """
        from distributed_dp import accounting
        scheme = accounting.CohortScheme(accounting.Sampling.POISSON, 1000, 50)
        parameters = accounting.calibrate(
            accounting.Mechanism.DDGAUSS, scheme, epsilon=4.0, delta=1e-5,
            num_rounds=10, l2_clip=1.0, bits=18, padded_dim=1024,
        )
        statement = accounting.compute_privacy(
            parameters, scheme, num_rounds=10, delta=1e-5
        )
        assert statement.epsilon <= 4.0
        loaded = Blocker.names & set(sys.modules)
        assert not loaded, loaded
        print("done")
        """
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "done"


def test_the_blocker_blocks():
    result = _run("import tensorflow")
    assert result.returncode != 0
    assert "blocked: tensorflow" in result.stderr


def test_all_names_are_there():
    from distributed_dp import accounting

    assert sorted(accounting.__all__) == sorted(set(accounting.__all__))
    for name in accounting.__all__:
        assert getattr(accounting, name) is not None
