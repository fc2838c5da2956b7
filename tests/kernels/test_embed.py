"""embed: a copy of rows, and a gradient that is summed per id over tokens ascending."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers import LAYOUTS, Layout, agree, assert_same_bits, flushing_denormals, gradient, segments, stream, wild
from memory import far_rows
from vexact_kernels.contract import DTYPES, Kernels, grad_dtype
from vexact_kernels.reference import Reference

IDS = torch.tensor([3, 0, 3, 32, 3, 31, 0, 7, 7])


def gradients(kernels: Kernels, ids: Tensor, dy: Tensor, vocabulary: int = 33) -> list[Tensor]:
    """The stream after a first lane that ends and a second one that goes on."""
    running = stream(vocabulary, dy.shape[1], touched=True)
    kernels.embed_dw(ids, dy, segments([5, len(ids)], [1, 0]), running)
    assert running.touched is not None
    lane, touched = running.lane.clone(), (running.touched != 0)
    kernels.embed_dw(ids[:2], dy[:2], segments([2]), running)
    return [lane, touched, running.lane, running.total, running.touched]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 31, 33, 127, 129])
def test_all_implementations_agree(everyone: list[Kernels], width: int, dtype: torch.dtype) -> None:
    w = wild(33, width, dtype=dtype, seed=1, low=-140)
    y = agree(lambda k: k.embed(IDS, k.pack(w)), everyone)
    assert_same_bits(y, w[IDS])
    dy = gradient(len(IDS), width, dtype=dtype, seed=2)
    agree(lambda k: gradients(k, IDS, dy), everyone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_sizes_are_copied(compiled: list[Kernels], dtype: torch.dtype) -> None:
    w = wild(1000, 576, dtype=dtype)
    ids = torch.arange(0, 1000, 7)
    assert_same_bits(agree(lambda k: k.embed(ids, k.pack(w)), compiled), w[ids])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_no_bit(everyone: list[Kernels], layout: Layout, dtype: torch.dtype) -> None:
    w, dy = wild(33, 35, dtype=dtype, seed=1), gradient(len(IDS), 35, dtype=dtype, seed=2)
    strided_ids = torch.stack([IDS, IDS + 100], dim=1)[:, 0]
    expected = gradients(everyone[0], IDS, dy)
    for kernels in everyone:
        assert_same_bits(kernels.embed(strided_ids, kernels.pack(layout(w))), w[IDS], kernels.name)
        assert_same_bits(gradients(kernels, strided_ids, layout(dy)), expected, kernels.name)


def test_the_gradient_is_the_sum_per_id(everyone: list[Kernels]) -> None:
    # small integers: exact in float32, whatever the order
    dy = torch.randint(-8, 9, (len(IDS), 5)).float()
    running = stream(33, 5, touched=True)
    everyone[-1].embed_dw(IDS, dy, segments([len(IDS)]), running)
    w = torch.zeros(33, 5, requires_grad=True)
    torch.nn.functional.embedding(IDS, w).backward(dy)
    assert w.grad is not None
    assert_same_bits(running.total, w.grad + 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_micro_batches_anywhere_give_the_same_stream(everyone: list[Kernels], dtype: torch.dtype) -> None:
    dy = gradient(len(IDS), 35, dtype=dtype)

    def cut_at(kernels: Kernels, cut: int) -> tuple[Tensor, Tensor]:
        running = stream(33, 35, touched=True)
        kernels.embed_dw(IDS[:cut], dy[:cut], segments([cut], [0]), running)
        kernels.embed_dw(IDS[cut:], dy[cut:], segments([len(IDS) - cut]), running)
        return running.lane, running.total

    expected = cut_at(everyone[0], 1)
    for kernels in everyone:
        for cut in range(1, len(IDS)):
            assert_same_bits(cut_at(kernels, cut), expected, f"{kernels.name} cut at {cut}")


def test_rows_may_lie_further_apart_than_two_to_the_31_elements(compiled: list[Kernels]) -> None:
    ids, dy = torch.tensor([3, 31]), gradient(2, 35, dtype=torch.bfloat16)
    streams = [stream(33, 35, touched=True) for _ in range(2)]
    Reference().embed_dw(ids, dy, segments([2]), streams[0])
    compiled[-1].embed_dw(ids, far_rows(dy), segments([2]), streams[1])
    assert_same_bits(streams[1].total, streams[0].total)


def test_an_ambient_flush_of_subnormals_changes_nothing(compiled: list[Kernels]) -> None:
    for dtype in DTYPES:
        dy = wild(len(IDS), 33, dtype=grad_dtype(dtype), low=-140, high=-127)
        w = wild(33, 33, dtype=dtype, low=-140, high=-127)
        expected = gradients(Reference(), IDS, dy)
        for kernels in compiled:
            with flushing_denormals():
                y, actual = kernels.embed(IDS, kernels.pack(w)), gradients(kernels, IDS, dy)
            assert_same_bits(y, w[IDS], kernels.name)
            assert_same_bits(actual, expected, kernels.name)


@pytest.mark.parametrize("bad", [-1, 33])
def test_an_id_outside_the_vocabulary_is_named(everyone: list[Kernels], bad: int) -> None:
    for kernels in everyone:
        with pytest.raises(IndexError, match=str(bad)):
            kernels.embed(torch.tensor([1, bad]), kernels.pack(torch.zeros(33, 4)))
