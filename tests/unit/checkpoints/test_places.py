# SPDX-License-Identifier: Apache-2.0
"""A path means the checkpoint that it names, and no other."""

from pathlib import Path

import pytest

from lightning_zero3.checkpoints.places import NoCheckpointError, find


@pytest.fixture
def folder(tmp_path) -> Path:
    for tag in ("global_step2", "global_step10", "checkpoint"):
        (tmp_path / tag).mkdir()
        (tmp_path / tag / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch()
    (tmp_path / "csv").mkdir()
    (tmp_path / "latest").write_text("global_step10\n")
    return tmp_path


def test_a_tag_is_asked_for_in_three_ways(folder):
    assert find(folder).shards == folder / "global_step10"
    assert find(folder).by_latest
    assert find(folder, "global_step2").shards == folder / "global_step2"
    assert find(str(folder / "checkpoint") + "/").shards == folder / "checkpoint"
    assert not find(folder / "checkpoint").by_latest


def test_a_folder_without_latest_is_a_tag_if_it_holds_shards(folder, monkeypatch):
    (folder / "latest").unlink()
    assert find(folder / "global_step2").tag == "global_step2"
    monkeypatch.chdir(folder / "global_step2")
    assert find(".").shards == folder / "global_step2"


@pytest.mark.parametrize("tag", ["gone", "csv", "", "..", "../checkpoint", "/tmp", "a\0b"])
@pytest.mark.parametrize("by", ["argument", "latest"])
def test_a_tag_that_is_not_there_is_refused_with_those_that_are(folder, tag, by):
    if by == "latest":
        (folder / "latest").write_text(tag)
    with pytest.raises(NoCheckpointError) as refused:
        find(folder, tag if by == "argument" else None)
    assert "Tags that are there: checkpoint, global_step10, global_step2." in str(refused.value)
    assert isinstance(refused.value, FileNotFoundError)


def test_what_is_no_sharded_checkpoint_is_refused(folder):
    (folder / "latest").unlink()
    with pytest.raises(NoCheckpointError, match=r"no file named latest\. Tags that are there"):
        find(folder)
    with pytest.raises(NoCheckpointError, match="No folder in it holds shards"):
        find(folder / "csv")
    with pytest.raises(NoCheckpointError, match="There is no such folder"):
        find(folder / "nowhere")
    with pytest.raises(NoCheckpointError, match=r"load_full_weights=True .* The shard belongs to"):
        find(folder / "checkpoint" / "zero_pp_rank_0_mp_rank_00_model_states.pt")


def test_a_universal_checkpoint_has_a_file_of_its_own(folder):
    with pytest.raises(NoCheckpointError, match="no file named latest_universal"):
        find(folder, universal=True)
    (folder / "latest_universal").write_text("checkpoint")
    assert find(folder, universal=True).shards == folder / "checkpoint"
