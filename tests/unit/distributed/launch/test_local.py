from __future__ import annotations

from pathlib import Path

import pytest

from caffepy.distributed.launch.launchers import Job, Rendezvous, local_commands, local_rank_name, secret_for
from caffepy.errors import ConfigError


def test_each_process_learns_what_torchrun_tells() -> None:
    rendezvous = Rendezvous(3, 1, "host0", 4711).complete()
    found = local_commands(Job(["caffepy", "train"], 2), rendezvous)
    assert [line for line, _ in found] == [["caffepy", "train"]] * 2
    shared = {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "host0", "MASTER_PORT": "4711"}
    assert found[0][1] == {"RANK": "2", "LOCAL_RANK": "0", **shared}
    assert found[1][1] == {"RANK": "3", "LOCAL_RANK": "1", **shared}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('p.add_argument("--local_rank", type=int)', "--local_rank"),
        ("p.add_argument('--local-rank', default=os.environ['LOCAL_RANK'])", "--local-rank"),
        ('os.environ["LOCAL_RANK"]', "LOCAL_RANK"),
        ("# started with --local_rank; OMPI_COMM_WORLD_LOCAL_RANK", None),
    ],
)
def test_a_script_asks_for_its_local_rank(tmp_path: Path, text: str, name: str | None) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert local_rank_name(["python", str(script), "other.py"]) == name
    assert local_rank_name(["python", "-m", "caffepy", str(script)]) is None
    assert local_rank_name([str(script)]) is None


def test_the_local_rank_comes_right_behind_the_script() -> None:
    found = local_commands(Job(["python", "a.py", "-x"], 2), Rendezvous().complete(), "--local_rank")
    assert [line for line, _ in found] == [["python", "a.py", f"--local_rank={local}", "-x"] for local in (0, 1)]


def test_one_machine_needs_no_address() -> None:
    rendezvous = Rendezvous().complete()
    assert rendezvous.address == "127.0.0.1" and rendezvous.port is not None and 1024 < rendezvous.port < 65536
    assert Rendezvous(2, 0, "a").complete().port == 29500


def test_one_machine_makes_its_own_secret() -> None:
    assert len(secret_for(Rendezvous(), {})["CAFFEPY_JOB_SECRET"]) == 64
    assert secret_for(Rendezvous(), {"CAFFEPY_JOB_SECRET": "given"}) == {}
    assert secret_for(Rendezvous(2, 0, "a"), {}) == {}


@pytest.mark.parametrize(
    ("rendezvous", "message"),
    [
        (Rendezvous(2, 2, "a"), "--node-rank 2: with --nnodes 2 it is 0 to 1"),
        (Rendezvous(2, 1), "--nnodes 2: where is rank 0"),
        (Rendezvous(1, 0, None, 65536), "--master-port 65536 is no port"),
    ],
)
def test_mistakes(rendezvous: Rendezvous, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rendezvous.complete()
