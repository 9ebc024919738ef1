import pytest

from caffepy.cli.main import main


def test_the_shipped_digits_become_two_lmdbs(tmp_path, capsys):
    assert main(["data", "mnist", "--subset", "--to", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path}/mnist_train_lmdb: 8500 digits\n{tmp_path}/mnist_test_lmdb: 1500 digits\n" == out
    assert main(["data", "mnist", "--subset", "--to", str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        f"{tmp_path}/mnist_train_lmdb: 8500 digits, there already\n"
        f"{tmp_path}/mnist_test_lmdb: 1500 digits, there already\n"
    )
    assert main(["data", "mnist", "--to", str(tmp_path)]) == 2  # the whole set; nothing is fetched
    assert "already exists; remove it, or give --overwrite" in capsys.readouterr().err
    assert main(["data", "mnist", "--subset", "--overwrite", f"--to={tmp_path}"]) == 0
    assert "8500 digits\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data"], "the following arguments are required: set"),
        (["data", "imagenet"], "invalid choice: 'imagenet'"),
        (["data", "mnist", "--subset", "--from", "."], "--subset and --from exclude each other"),
        (["data", "mnist", "--from", "/nonexistent"], "'/nonexistent' has no train-images-idx3-ubyte"),
    ],
)
def test_mistakes(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
