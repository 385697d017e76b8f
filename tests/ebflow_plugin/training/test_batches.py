"""Batches that know their place."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ebflow_plugin.training import batches
from ebflow_plugin.training.batches import Loader, once

X = torch.arange(14.0).reshape(14, 1)


def rows(loader):
    return [batch.flatten().tolist() for batch in loader]


def joined(parts):
    return [row for part in parts for row in part]


def test_an_epoch_sees_every_row_once_and_in_another_order_each_time():
    loader = Loader(X, 4, seed=0)
    epochs = [joined(rows(loader)) for _ in range(3)]
    assert [len(epoch) for epoch in epochs] == [12, 12, 12]  # rows that fill no batch are left out
    assert all(len(set(epoch)) == 12 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert len(set(joined(epochs))) > 12  # other rows each time
    again = Loader(X, 4, seed=0)
    again.set_epoch(2)
    assert joined(rows(again)) == epochs[2]
    assert joined(rows(Loader(X, 4, seed=1))) != epochs[0]


@pytest.mark.parametrize("world", [2, 3])
def test_processes_share_each_batch(monkeypatch, world):
    whole = rows(Loader(X, 2 * world, seed=0))
    parts = []
    for rank in range(world):
        monkeypatch.setattr(batches, "process", lambda rank=rank: (rank, world))
        parts.append(rows(Loader(X, 2, seed=0)))
        assert len(Loader(X, 2, seed=0)) == len(whole)
    assert [joined(part) for part in zip(*parts, strict=True)] == whole


def test_in_order_all_rows_are_seen_once_by_one_process_and_all_have_as_many_batches(monkeypatch):
    assert rows(Loader(X, 5, shuffle=False)) == [[*range(5)], [*range(5, 10)], [*range(10, 14)]]
    seen = []
    for rank in range(2):
        monkeypatch.setattr(batches, "process", lambda rank=rank: (rank, 2))
        found = rows(Loader(X, 5, shuffle=False))
        assert len(found) == 2
        seen += joined(found)
    assert sorted(seen) == X.flatten().tolist()


@pytest.mark.parametrize("place", range(8))
def test_a_place_is_found_again(place):
    loader = Loader(X, 4, seed=3)
    stream = (batch for _ in range(4) for batch in loader)
    for _ in range(place):
        next(stream)
    again = Loader(X, 4, seed=3)
    again.load_state_dict(loader.state_dict())
    later = (batch for _ in range(4) for batch in again)
    assert [next(stream).tolist() for _ in range(4)] == [next(later).tolist() for _ in range(4)]


def test_a_place_that_is_counted_in_other_batches_is_the_start_of_its_epoch():
    loader = Loader(X, 4)
    next(iter(loader))
    state = loader.state_dict()
    for other in (Loader(X, 5), Loader(X[:10], 4)):
        other.load_state_dict(state)
        assert (other.epoch, other.place) == (0, 0)
    same = Loader(X, 4)
    same.load_state_dict(state)
    assert same.place == 1


def test_one_pass_leaves_the_place_alone_and_a_counter_need_not_exhaust_it():
    loader = Loader(X, 4, seed=0)
    stream = iter(loader)
    next(stream)
    assert len(list(once(loader))) == 3
    assert (loader.epoch, loader.place) == (0, 1)
    next(stream)
    next(stream)  # the last one; Lightning counts, and asks for no more
    assert len(rows(loader)) == 3


def test_one_pass_leaves_a_pass_of_persistent_workers_alone():
    """They serve one iterator, which a second pass over the same DataLoader would begin anew."""
    loader = DataLoader(TensorDataset(X), batch_size=5, num_workers=1, persistent_workers=True)
    seen = []
    for (batch,) in loader:
        seen.append(batch.flatten().tolist())
        assert len(list(once(loader))) == 3
    assert seen == [[*range(5)], [*range(5, 10)], [*range(10, 14)]]


def test_pairs_and_datasets():
    class Squares(Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            return torch.tensor([float(index)]), torch.tensor([float(index**2)])

    for data in (Squares(), TensorDataset(X[:6], X[:6].square()), (X[:6], X[:6].square())):
        for x, context in Loader(data, 2):
            assert torch.equal(context, x.square())


def test_too_few_rows_for_all_processes(monkeypatch):
    monkeypatch.setattr(batches, "process", lambda: (0, 20))
    with pytest.raises(batches.InputError, match="14 rows, too few for 20 processes"):
        len(Loader(X, 4))
