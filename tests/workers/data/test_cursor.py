from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.data.cursor import row_at

seeds = st.integers(0, 2**31 - 1)


@given(seed=seeds, n_rows=st.integers(1, 200), epoch=st.integers(0, 1000))
def test_each_epoch_draws_each_row_once(seed, n_rows, epoch):
    rows = [row_at(seed, epoch * n_rows + offset, n_rows, True) for offset in range(n_rows)]
    assert sorted(rows) == list(range(n_rows))


@given(seed=seeds, n_rows=st.integers(1, 10**12), position=st.integers(0, 10**12), shuffle=st.booleans())
def test_a_row_is_always_in_the_file(seed, n_rows, position, shuffle):
    assert 0 <= row_at(seed, position, n_rows, shuffle) < n_rows


@given(n_rows=st.integers(1, 100), position=st.integers(0, 1000))
def test_without_shuffling_the_order_is_the_files(n_rows, position):
    assert row_at(7, position, n_rows, False) == position % n_rows


def test_seeds_and_epochs_give_different_orders():
    def order(seed, epoch):
        return tuple(row_at(seed, epoch * 100 + offset, 100, True) for offset in range(100))

    orders = {order(seed, epoch) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_an_order_is_the_same_in_every_version():
    """A run that resumes on a newer version must go on where it was."""
    assert [row_at(1, position, 10, True) for position in range(10)] == [5, 3, 2, 8, 0, 1, 4, 6, 9, 7]


def test_all_orders_of_three_rows_are_about_equally_frequent():
    orders = Counter(
        tuple(row_at(0, epoch * 3 + offset, 3, True) for offset in range(3)) for epoch in range(3000)
    )
    assert len(orders) == 6
    assert all(400 < count < 600 for count in orders.values())  # 500 expected, standard deviation 20


@pytest.mark.parametrize(("position", "n_rows"), [(0, 0), (-1, 5)])
def test_no_row_is_an_error(position, n_rows):
    with pytest.raises(ValueError, match="no row"):
        row_at(0, position, n_rows, True)
