"""Lanes are cut from the whole step, so no micro-batch can move them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vexact.model.gradients import lanes_of, part_of, rows_in, segments_of
from vexact_kernels import Segments


def as_lists(segments: Segments) -> tuple[list[int], list[int]]:
    return segments.ends.tolist(), segments.fold.tolist()


def test_lanes_are_consecutive_and_as_equal_as_can_be() -> None:
    assert lanes_of(16) == [i // 2 for i in range(16)]
    assert lanes_of(3) == [0, 2, 5]
    assert lanes_of(0) == []


def test_a_lane_ends_where_the_next_rollout_belongs_to_another() -> None:
    assert as_lists(segments_of([3, 2, 4], [0, 0, 1], None)) == ([5, 9], [1, 1])
    assert as_lists(segments_of([3, 2, 4], [0, 0, 1], 1)) == ([5, 9], [1, 0])
    assert as_lists(segments_of([3], [0], 0)) == ([3], [0])


def test_rows_are_counted_in_their_lanes() -> None:
    segments = segments_of([3, 2, 4], [0, 1, 2], None)
    assert as_lists(rows_in(segments, torch.tensor([1, 2, 4, 7, 8]))) == ([2, 3, 5], [1, 1, 1])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 7), st.integers(1, 5))
def test_any_cut_folds_every_lane_once_and_in_order(lengths: list[int], at_once: int, part: int) -> None:
    lane_of = lanes_of(len(lengths))
    walked: list[tuple[int, int]] = []  # (rows, lane) in the order the kernels meet them
    lane = 0
    order = sorted(set(lane_of))
    for begin in range(0, len(lengths), at_once):
        end = min(begin + at_once, len(lengths))
        following = lane_of[end] if end < len(lengths) else None
        segments = segments_of(lengths[begin:end], lane_of[begin:end], following)
        total = int(segments.ends[-1])
        assert total == sum(lengths[begin:end])
        for first in range(0, total, part):
            piece = part_of(segments, slice(first, min(first + part, total)))
            previous = 0
            for stop, fold in zip(*as_lists(piece), strict=True):
                walked.append((stop - previous, order[lane]))
                previous = stop
                lane += fold
            assert previous == min(part, total - first)
    assert lane == len(order)
    for which in order:
        rows = sum(count for count, of in walked if of == which)
        assert rows == sum(length for length, of in zip(lengths, lane_of, strict=True) if of == which)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 32])
def test_no_more_than_eight_lanes(count: int) -> None:
    lanes = lanes_of(count)
    assert lanes == sorted(lanes) and min(lanes) >= 0 and max(lanes) <= 7
