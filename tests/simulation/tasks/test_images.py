"""Tests for EMNIST and CIFAR: what a task gives of a file, against the file's rows."""

import itertools
import pathlib

import numpy as np
import pytest
import tensorflow_federated as tff

from simulation.population import layout
from simulation.population.partition import Partition, PartitionKind
from simulation.sources import cifar
from simulation.sources.source import TEST, TRAIN
from simulation.tasks import TaskOptions, load_task
from tests.simulation.tasks import files

_ARCHIVE = (
    pathlib.Path(__file__).parents[4]
    / "shared/data/cifar10/cifar-10-python-subset.tar.xz"
)
CHARACTERS = files.draw_characters()
# As widely published, of red, green and blue.
MEAN, STDDEV = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@pytest.fixture
def load(data_dir):
    return lambda name, **options: load_task(
        name, TaskOptions(data_dir=data_dir, **options)
    )


def name_rows(data) -> dict[bytes, tuple[str, int]]:
    """Returns the client and the label of each image; none may be there twice."""
    found = {}
    for client_id in data.client_ids:
        for image, label in zip(*data.load(client_id), strict=True):
            assert image.tobytes() not in found
            found[image.tobytes()] = (client_id, int(label))
    return found


class TestEmnist:
    @pytest.mark.parametrize(
        ("name", "first", "last"),
        [
            ("emnist_character", 0, 61),
            ("emnist_digits", 0, 9),
            ("emnist_letters", 10, 61),
        ],
    )
    @pytest.mark.parametrize("split", [TRAIN, TEST])
    def test_arrays_are_those_of_the_rows(self, name, first, last, split, load):
        task = load(name)
        data = task.train if split == TRAIN else task.test
        expected = files.gather(CHARACTERS, split)
        for client_id, features in expected.items():
            kept = [first <= label <= last for label in features["label"]]
            if name == "emnist_digits" and not any(kept):
                assert client_id not in data.client_ids
                continue
            x, y = data.load(client_id)
            assert x.dtype == np.float32 and y.dtype == np.int32
            assert y.tolist() == (features["label"][kept] - first).tolist()
            # Ink is what is far from 1 in the file.
            ink = 1.0 - features["pixels"][kept].astype(np.float64)
            np.testing.assert_allclose(x[..., 0], ink, rtol=0, atol=1e-7)
            assert data.count(client_id) == sum(kept)
        # Users are those of the rows, and no others.
        assert set(data.client_ids) <= set(expected)

    def test_the_background_is_zero(self, tmp_path):
        pixels = np.ones([28, 28], np.float32)
        pixels[3, 4] = 0.25
        rows = [("w", split, {"pixels": pixels, "label": 0}) for split in (TRAIN, TEST)]
        features = {
            "pixels": files.Feature(kind=files.Kind.FLOAT, shape=(28, 28)),
            "label": files.NUMBER,
        }
        files.write(tmp_path, layout.EMNIST, rows, features)
        task = load_task("emnist_digits", TaskOptions(data_dir=tmp_path))
        x, _ = task.train.load("w")
        assert x.shape == (1, 28, 28, 1)
        assert np.flatnonzero(x).tolist() == [3 * 28 + 4] and x.max() == 0.75

    def test_letters_leave_digits_out(self, load):
        task = load("emnist_letters")
        for data in (task.train, task.test):
            # A writer of digits alone is there, with nothing.
            counts = {name: data.count(name) for name in data.client_ids}
            assert counts["f1_digits"] == 0 and counts["f0_mixed"] == 4
            x, y = data.load("f1_digits")
            assert x.shape == (0, 28, 28, 1) and y.shape == (0,)
            labels = data.load("f2_letters")[1]
            assert labels.tolist() == [0, 25, 26]
        assert task.build_model().example_spec["x"].shape == [None, 28, 28, 1]

    def test_letters_of_a_file_without_digits(self, tmp_path):
        rows = [row for row in CHARACTERS if row[2]["label"] >= 10]
        features = {
            "pixels": files.Feature(kind=files.Kind.FLOAT, shape=(28, 28)),
            "label": files.NUMBER,
        }
        files.write(tmp_path, layout.EMNIST, rows, features)
        task = load_task("emnist_letters", TaskOptions(data_dir=tmp_path))
        assert task.train.count("f2_letters") == 3

    def test_letters_have_no_made_up_set(self, load):
        with pytest.raises(
            ValueError, match="`synthetic_data` must be off.*Found True"
        ):
            load("emnist_letters", synthetic_data=True)

    def test_tff_reads_the_same(self, data_dir, load):
        theirs, _ = tff.simulation.datasets.emnist.load_data(
            only_digits=False, cache_dir=str(data_dir)
        )
        data = load("emnist_character").train
        assert list(data.client_ids) == theirs.client_ids
        x, y = data.load("f0_mixed")
        examples = list(
            theirs.create_tf_dataset_for_client("f0_mixed").as_numpy_iterator()
        )
        assert y.tolist() == [example["label"] for example in examples]
        pixels = np.stack([example["pixels"] for example in examples])
        np.testing.assert_allclose(1.0 - x[..., 0], pixels, rtol=0, atol=1e-7)

    def test_a_file_with_a_name(self, tmp_path):
        features = {
            "pixels": files.Feature(kind=files.Kind.FLOAT, shape=(28, 28)),
            "label": files.NUMBER,
        }
        target = layout.rename(layout.EMNIST, "other")
        files.write(tmp_path, target, CHARACTERS[:12], features)
        options = TaskOptions(data_dir=tmp_path, data_name="other")
        assert load_task("emnist_character", options).train.count("f0_mixed") == 6

    @pytest.mark.parametrize(
        ("task", "model", "parameters"),
        [
            ("emnist_character", None, 1_018_174),
            ("emnist_character", "fedavg_cnn", 1_690_046),
            ("emnist_character", "conv_dropout_cnn", 1_206_590),
            ("emnist_character", "logistic_regression", 785 * 62),
            ("emnist_digits", "mlp", 235_920 + 170),
            ("emnist_digits", "small_mlp", 784 * 64 + 64 + 65 * 32 + 33 * 16 + 170),
            ("emnist_digits", "small_cnn", 20_490),
            ("emnist_letters", "mlp", 235_920 + 17 * 52),
            ("emnist_letters", "emnist_cnn", 1_018_174 - 10 * 129),
            ("femnist_af", None, 155_830),
            ("femnist_af", "cnn", 2_130_140),
            ("cifar10", None, 734_432 + 330),
            ("cifar100", None, 316_384 + 3_300),
            ("cifar100", "logistic_regression", 3073 * 100),
        ],
    )
    def test_parameters(self, task, model, parameters, load):
        assert load(task).build_model(model).num_parameters == parameters

    @pytest.mark.parametrize(
        ("task", "model", "head"),
        [
            ("cifar10", None, 330),
            ("cifar100", None, 3_300),
            ("emnist_digits", "mlp", 170),
        ],
    )
    def test_heads(self, task, model, head, load):
        built = load(task).build_model(model)
        weights = built.initialize(np.random.default_rng(0))
        last = built.layers[-1]
        assert last.name == "logits"
        assert sum(w.size for w in weights[-last.num_weights :]) == head


class TestFemnistAf:
    def pool(self, split) -> dict[bytes, int]:
        """Returns the labels of all images a to j, from the rows."""
        return {
            (np.float32(1.0) - features["pixels"]).tobytes(): features["label"] - 36
            for _, where, features in CHARACTERS
            if where == split and 36 <= features["label"] <= 45
        }

    def test_fifty_clients_with_at_most_five_letters(self, load):
        task = load("femnist_af")
        assert task.num_clients == 50
        for data, split in ((task.train, TRAIN), (task.test, TEST)):
            found, pool = name_rows(data), self.pool(split)
            assert {image: label for image, (_, label) in found.items()}.items() <= (
                pool.items()
            )
            assert len({label for _, label in found.values()}) == 10
        labels = {name: set(task.train.load(name)[1]) for name in task.train.client_ids}
        sizes = {len(found) for found in labels.values()}
        assert max(sizes) == 5 and min(sizes) >= 4
        # Nobody is tested on what it never saw.
        for client_id in task.test.client_ids:
            assert set(task.test.load(client_id)[1]) <= labels[client_id]

    def test_options(self, load):
        task = load("femnist_af", num_clients=7, classes_per_client=2)
        assert task.num_clients == 7
        for client_id in task.train.client_ids:
            assert len(set(task.train.load(client_id)[1])) <= 2
        one, again, other = (load("femnist_af", data_seed=seed) for seed in (0, 0, 1))
        rows = [name_rows(task.train) for task in (one, again, other)]
        assert rows[0] == rows[1] != rows[2]
        assert one.identity == again.identity != other.identity

    def test_that_labels_made_the_clients_is_a_caveat(self, load):
        (caveat,) = load("femnist_af").caveats
        assert "how the examples were divided among clients" in caveat
        assert "which followed from their labels" in caveat
        # Writers divide these themselves.
        assert load("emnist_character").caveats == ()


def normalize(image: np.ndarray, mean=MEAN, stddev=STDDEV) -> np.ndarray:
    return (image / 255.0 - np.array(mean)) / np.array(stddev)


class TestCifar:
    @pytest.mark.parametrize("num_classes", [10, 100])
    @pytest.mark.parametrize("split", [TRAIN, TEST])
    def test_arrays_are_those_of_the_rows(self, num_classes, split, load):
        task = load(f"cifar{num_classes}")
        data = task.train if split == TRAIN else task.test
        expected = files.gather(files.draw_pictures(num_classes), split)
        assert data.client_ids == tuple(expected)
        for client_id, features in expected.items():
            x, y = data.load(client_id)
            assert x.dtype == np.float32 and y.dtype == np.int32
            assert y.tolist() == features["label"].tolist()
            right = normalize(features["image"])
            np.testing.assert_allclose(x, right, rtol=1e-5, atol=1e-6)
            # The channels' order shows.
            wrong = normalize(features["image"], MEAN[::-1], STDDEV[::-1])
            assert np.abs(wrong - right).max() > 0.05

    def test_tff_reads_the_same(self, data_dir, load):
        theirs, _ = tff.simulation.datasets.cifar100.load_data(str(data_dir))
        x, y = load("cifar100").train.load("user_1")
        examples = list(
            theirs.create_tf_dataset_for_client("user_1").as_numpy_iterator()
        )
        assert y.tolist() == [example["label"] for example in examples]
        images = np.stack([example["image"] for example in examples])
        np.testing.assert_allclose(x, normalize(images), rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize(
        ("num_classes", "partition", "options"),
        [
            (
                10,
                Partition(kind=PartitionKind.DIRICHLET, num_clients=6, alpha=0.5),
                {"num_clients": 6, "data_alpha": 0.5},
            ),
            (
                10,
                Partition(
                    kind=PartitionKind.SHARDS, num_clients=10, classes_per_client=3
                ),
                {"num_clients": 10, "classes_per_client": 3},
            ),
            # As many clients as the file has.
            (10, Partition(kind=PartitionKind.DIRICHLET, num_clients=2), {}),
            (
                100,
                Partition(kind=PartitionKind.PACHINKO, num_clients=4, seed=9),
                {"num_clients": 4, "data_seed": 9},
            ),
            (100, Partition(kind=PartitionKind.DIRICHLET, num_clients=2), {}),
        ],
    )
    def test_partitions(self, num_classes, partition, options, load):
        task = load(f"cifar{num_classes}", partition=partition.kind, **options)
        plain = load(f"cifar{num_classes}")
        assert task.num_clients == partition.num_clients
        # The pool is that of the file, user by user.
        pools = {}
        for split in (TRAIN, TEST):
            clients = files.gather(files.draw_pictures(num_classes), split).values()
            pools[split] = {
                name: np.concatenate([features[name] for features in clients])
                for name in next(iter(clients))
            }
        division = partition.divide(
            pools[TRAIN]["label"], coarse=pools[TRAIN].get("coarse_label")
        )
        rows = {TRAIN: division.rows, TEST: division.follow(pools[TEST]["label"])}
        for split, data in ((TRAIN, task.train), (TEST, task.test)):
            for index, chosen in enumerate(rows[split]):
                client_id = f"part_{index:05d}"
                if not len(chosen):
                    assert client_id not in data.client_ids
                    continue
                x, y = data.load(client_id)
                assert y.tolist() == pools[split]["label"][chosen].tolist()
                images = normalize(pools[split]["image"][chosen])
                np.testing.assert_allclose(x, images, rtol=1e-5, atol=1e-6)
        # No image has two clients, and none is made up.
        whole = {image: label for image, (_, label) in name_rows(plain.train).items()}
        for image, (_, label) in name_rows(task.train).items():
            assert whole[image] == label
        if partition.kind is PartitionKind.SHARDS:
            counts = [
                len(set(task.train.load(client_id)[1]))
                for client_id in task.train.client_ids
            ]
            assert max(counts) <= 3

    def test_a_partition_is_in_description_and_identity(self, load):
        tasks = [
            load("cifar10", **options)
            for options in (
                {},
                {"partition": PartitionKind.DIRICHLET},
                {"partition": PartitionKind.SHARDS},
                {"partition": PartitionKind.DIRICHLET, "data_alpha": 0.5},
                {"partition": PartitionKind.DIRICHLET, "num_clients": 3},
                {"partition": PartitionKind.DIRICHLET, "data_seed": 1},
            )
        ]
        for one, other in itertools.combinations(tasks, 2):
            assert one.identity != other.identity
            assert one.description != other.description
            # All of them may be of a partition: that of the file too.
            for task in (one, other):
                (caveat,) = task.caveats
                assert "how the examples were divided among clients" in caveat
        assert "users as in the file" in tasks[0].description
        assert "Dirichlet(0.5)" in tasks[3].description


@pytest.mark.skipif(
    not _ARCHIVE.is_file(), reason=f"the real CIFAR files are absent: {_ARCHIVE}"
)
def test_real_images_are_normal(tmp_path):
    def fail(error):
        raise error

    def assign(split, labels):
        return [f"{split}_{index % 10}" for index in range(len(labels["label"]))]

    reader = cifar.CifarSource(path=_ARCHIVE, assign=assign)
    rows = [
        (record.client_id, record.split, dict(record.features))
        for record in itertools.islice(reader.read(fail), 0, None, 4)
    ]
    files.write(tmp_path, files.CIFAR10, rows, reader.features)
    task = load_task("cifar10", TaskOptions(data_dir=tmp_path))
    x = np.concatenate([task.train.load(name)[0] for name in task.train.client_ids])
    assert len(x) == 1_500
    # Images differ in brightness: of 1,500 the mean is within 0.1, and without the
    # mean or the standard deviation taken off it is 0.45, or 1.9.
    assert np.abs(x.mean((0, 1, 2))).max() < 0.1
    assert np.abs(x.std((0, 1, 2)) - 1.0).max() < 0.05
