import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.data.prefetch import Batch
from caffepy.errors import DataError
from caffepy.layers.input.hdf5 import Hdf5Loader, Hdf5Source


def write(path, **datasets):
    with h5py.File(path, "w") as file:
        for name, values in datasets.items():
            file[name] = values
    return path


def source(tmp_path, sizes, names=("data", "label")):
    """Files of so many rows; a row's label is its number among all."""
    start, files = 0, []
    for i, size in enumerate(sizes):
        labels = np.arange(start, start + size)
        files.append(
            write(tmp_path / f"{i}.h5", data=labels.reshape(-1, 1, 1, 1) * np.ones((1, 2, 2, 3)), label=labels)
        )
        start += size
    (tmp_path / "list.txt").write_text("\n".join(map(str, files)))
    return Hdf5Source(tmp_path / "list.txt", names)


def load(loader, first, count):
    batch = Batch(2)
    loader.load(first, count, batch)
    data, label = batch.arrays
    assert data.shape == (count, 2, 2, 3)
    assert (data == label.reshape(-1, 1, 1, 1)).all()
    return label.tolist()


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4), first=st.integers(0, 40), count=st.integers(1, 25))
def test_rows_come_file_by_file_and_start_again(tmp_path_factory, sizes, first, count):
    rows = source(tmp_path_factory.mktemp("h5"), sizes)
    total = sum(sizes)
    assert load(Hdf5Loader(rows), first, count) == [(first + i) % total for i in range(count)]


@settings(max_examples=25)
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4), cut=st.integers(1, 30), seed=st.integers(0, 99))
def test_shuffled_rows_do_not_depend_on_how_they_are_asked_for(tmp_path_factory, sizes, cut, seed):
    rows = source(tmp_path_factory.mktemp("h5"), sizes)
    whole = load(Hdf5Loader(rows, True, seed), 0, 31)
    subject = Hdf5Loader(rows, True, seed)
    later = load(subject, cut, 31 - cut) if cut < 31 else []
    assert load(subject, 0, cut) + later == whole
    names = [int(subject.describe(sample).split()[1]) for sample in range(31)]
    starts = np.cumsum([0, *sizes])
    files = [int(subject.describe(sample)[:-4].split("/")[-1]) for sample in range(31)]
    assert [starts[file] + row for file, row in zip(files, names, strict=True)] == whole


def test_shuffling_keeps_files_together_and_changes_every_epoch(tmp_path):
    rows = source(tmp_path, [6, 5])
    epochs = np.array(load(Hdf5Loader(rows, True, 3), 0, 110)).reshape(10, 11)
    assert all(sorted(epoch) == list(range(11)) for epoch in epochs)
    assert len({epoch.tobytes() for epoch in epochs}) == 10
    for epoch in epochs:
        in_first_file = epoch < 6
        assert (np.diff(in_first_file.astype(int)) != 0).sum() == 1


def test_a_fingerprint_tells_sets_apart(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    one, other = (source(tmp_path / name, sizes) for name, sizes in (("a", [3, 2]), ("b", [3, 4])))
    assert one.fingerprint()["the number of rows of each file"] == "3, 2"
    assert one.fingerprint()["the hash of the first row"] == other.fingerprint()["the hash of the first row"]
    write(other.files[0], data=np.full((3, 2, 2, 3), 7.0), label=np.zeros(3))
    again = Hdf5Source(tmp_path / "b" / "list.txt", ("data", "label"))
    assert again.fingerprint()["the hash of the first row"] != one.fingerprint()["the hash of the first row"]


def test_one_file_is_held_at_a_time(tmp_path):
    rows = source(tmp_path, [3, 3])
    first = rows.arrays(0)
    assert rows.arrays(0) is first
    assert rows.arrays(1)[1].tolist() == [3, 4, 5]
    assert rows.arrays(0) is not first
    rows.close()
    rows.close()


def test_files_beside_the_list_are_found(tmp_path):
    write(tmp_path / "a.h5", data=np.zeros((2, 3)), label=np.zeros(2))
    (tmp_path / "list.txt").write_text("a.h5\n\n")
    assert Hdf5Source(tmp_path / "list.txt", ["data", "label"]).rows == [2]


def test_a_list_may_begin_with_a_byte_order_mark(tmp_path):
    write(tmp_path / "a.h5", data=np.zeros((2, 3)), label=np.zeros(2))
    (tmp_path / "list.txt").write_text("\ufeffa.h5\r\n")
    assert Hdf5Source(tmp_path / "list.txt", ["data", "label"]).rows == [2]


# -- what is wrong ---------------------------------------------------------------------------------------


def refused(tmp_path, message, **datasets):
    write(tmp_path / "a.h5", **datasets)
    (tmp_path / "list.txt").write_text("a.h5")
    with pytest.raises(DataError, match=message):
        Hdf5Source(tmp_path / "list.txt", ["data", "label"])


def test_missing_dataset(tmp_path):
    refused(tmp_path, r"HDF5 file '.*a\.h5' has no dataset 'label'; it has: data, labels", data=[1.0], labels=[1])


def test_a_group_is_no_dataset(tmp_path):
    refused(tmp_path, "has no dataset 'data'", **{"data/x": [1], "label": [1]})


def test_strings(tmp_path):
    refused(tmp_path, "dataset 'data' holds .*; a top takes numbers", data=[b"a"], label=[1])


@pytest.mark.parametrize("values", [np.zeros((0, 3)), np.float32(1), np.zeros((3, 0))])
def test_empty_dataset(tmp_path, values):
    refused(tmp_path, "dataset 'data' is empty or has no axis of rows", data=values, label=[1])


def test_different_numbers_of_rows(tmp_path):
    refused(tmp_path, "different numbers of rows: 'data' has 2, 'label' has 3", data=np.zeros((2, 2)), label=[1, 2, 3])


def test_different_rows_in_different_files(tmp_path):
    write(tmp_path / "a.h5", data=np.zeros((2, 3)))
    write(tmp_path / "b.h5", data=np.zeros((2, 4)))
    (tmp_path / "list.txt").write_text("a.h5 b.h5")
    with pytest.raises(DataError, match=r"b\.h5': rows of shape \[\(4,\)\], but those of '.*a\.h5' are \[\(3,\)\]"):
        Hdf5Source(tmp_path / "list.txt", ["data"])


def test_a_dataset_too_large_for_a_blob(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("data", (2**40, 3), "f4", chunks=(1000, 3))
    (tmp_path / "list.txt").write_text("a.h5")
    with pytest.raises(DataError, match="'/data' would take [0-9]+ bytes, but the file has only 0 of it"):
        Hdf5Source(tmp_path / "list.txt", ["data"])


@pytest.mark.parametrize(
    ("content", "message"),
    [("", r"HDF5 list '.*' names no files"), ("b.h5", r"HDF5 file 'b\.h5' does not exist \(looked from /")],
)
def test_bad_lists(tmp_path, content, message):
    (tmp_path / "list.txt").write_text(content)
    with pytest.raises(DataError, match=message):
        Hdf5Source(tmp_path / "list.txt", ["data"])


@pytest.mark.parametrize("size", [0, 1 << 27])
def test_a_source_that_is_the_hdf5_file_itself(tmp_path, size):
    with h5py.File(tmp_path / "train.h5", "w") as file:
        file["data"] = np.zeros((2, 3))
    with open(tmp_path / "train.h5", "ab") as file:
        file.truncate(max(size, file.tell()))
    with pytest.raises(DataError, match=r"train\.h5' is an HDF5 file; hdf5_data_param.source must name a text file"):
        Hdf5Source(tmp_path / "train.h5", ["data"])


def test_absent_list(tmp_path):
    with pytest.raises(DataError, match=r"HDF5 list '.*nothing' cannot be read: .*No such file"):
        Hdf5Source(tmp_path / "nothing", ["data"])


@pytest.mark.parametrize("size", [0, 100, 1500])
def test_truncated_files(tmp_path, size):
    path = write(tmp_path / "a.h5", data=np.zeros((500, 3)))
    with path.open("r+b") as file:
        file.truncate(size)
    (tmp_path / "list.txt").write_text("a.h5")
    with pytest.raises(DataError, match=r"HDF5 file '.*a\.h5' cannot be read: "):
        Hdf5Source(tmp_path / "list.txt", ["data"])
