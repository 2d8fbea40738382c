"""What the simulated systems share: seeds, cohorts, tasks, training and its files.

`simulation` knows none of the systems. Its modules are imported by name, because most
of them need TensorFlow or TFF and some must not wait for them:

- without TensorFlow: `seeds`, `cohort`, `ledger`, `run_folder`, `table`, `plot`,
  `process`;
- with TensorFlow: `model`, `tasks`, `evaluation`;
- with TFF: `execution`, `learning`, `checkpoint`, `training`.
"""
