"""Keys of noise."""

from __future__ import annotations

import numpy as np
import torch

from vexact.study import keys


def test_a_key_follows_from_what_it_names_and_the_order() -> None:
    assert keys.mixed(1, 2) == keys.mixed(1, 2)
    assert len({int(keys.mixed(*parts)[0]) for parts in [(1, 2), (2, 1), (1, 2, 0), (1,), (1, 3), (0, 1, 2)]}) == 6


def test_numbers_and_columns_mix_alike() -> None:
    column = keys.column(torch.tensor([4, -5], dtype=torch.int64))
    both = keys.mixed(7, column)
    assert both[0] == keys.mixed(7, 4)[0]
    assert both[1] == keys.mixed(7, (1 << 64) - 5)[0]


def test_keys_of_consecutive_numbers_are_spread_over_all_bits() -> None:
    found = keys.mixed(3, keys.of(range(4096)))
    bits = np.unpackbits(found.view(np.uint8)).reshape(-1, 64).mean(axis=0)
    assert np.abs(bits - 0.5).max() < 0.05  # six standard deviations
    assert np.abs(keys.uniforms(found).mean() - 0.5) < 0.03


def test_a_name_is_not_its_anagram() -> None:
    assert keys.named("hidden") != keys.named("niddeh")
