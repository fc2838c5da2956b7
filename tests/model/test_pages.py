"""Pages have counted owners, and none is lost."""

from __future__ import annotations

import pytest
import torch

from vexact.model.pages import OutOfPages, Pages, pages_for
from vexact.model.tiny import tiny_config


def pool(count: int) -> Pages:
    return Pages(tiny_config(), count, torch.float32)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (64, 1), (65, 2), (128, 2), (129, 3)])
def test_a_page_holds_64_positions(tokens: int, pages: int) -> None:
    assert pages_for(tokens) == pages


def test_a_page_is_free_when_its_last_owner_gives_it_back() -> None:
    pages = pool(4)
    mine = pages.take(3)
    theirs = pages.share(mine[:2])
    pages.give_back(mine)
    assert pages.free == 2
    pages.give_back(theirs)
    assert pages.free == 4


def test_too_many_pages_are_refused_whole() -> None:
    pages = pool(2)
    with pytest.raises(OutOfPages, match="3 pages wanted, 2 of 2 are free"):
        pages.take(3)
    assert pages.free == 2


def test_a_copy_has_the_contents_and_no_other_owner() -> None:
    pages = pool(3)
    (page,) = pages.take(1)
    for layer in range(2):
        keys, values = pages.layer(layer)
        keys[page], values[page] = layer + 1.0, layer + 3.0
    copy = pages.copy(page)
    assert copy != page and pages.free == 1
    assert [pages.layer(i)[0][copy].unique().tolist() for i in range(2)] == [[1.0], [2.0]]
    assert [pages.layer(i)[1][copy].unique().tolist() for i in range(2)] == [[3.0], [4.0]]


def test_layers_may_follow_each_other_in_one_memory() -> None:
    pages = Pages(tiny_config(), 2, torch.float32, layers=1)
    assert pages.layer(0)[0].data_ptr() == pages.layer(1)[0].data_ptr()
