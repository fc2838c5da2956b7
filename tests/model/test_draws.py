"""A draw has an address of unsigned integers, and every bit of it counts."""

from __future__ import annotations

import torch

from vexact.model.draws import Address, Draws
from vexact_kernels import load


def drawn(**changes: int) -> int:
    d = Draws.at([Address(1, 2, 3, 4, 1.0)._replace(**changes)])
    logits = torch.zeros(1, 1 << 16)
    return int(load("cpu").draw(logits, d.temperature, d.seed, d.request, d.sample, d.position))


def test_the_highest_unsigned_values_keep_their_bits() -> None:
    top = Draws.at([Address((1 << 64) - 1, 1 << 63, (1 << 32) - 1, 7, 0.5)])
    assert top.seed.tolist() == [-1] and top.request.tolist() == [-(1 << 63)]
    assert top.sample.tolist() == [(1 << 32) - 1] and top.position.tolist() == [7]
    assert top.temperature.dtype == torch.float32


def test_every_part_of_the_address_is_another_draw() -> None:
    variants = [
        {},
        {"seed": 2},
        {"seed": 1 << 32},
        {"seed": 1 << 63},
        {"request": 3},
        {"request": 1 << 32},
        {"request": 1 << 63},
        {"sample": 4},
        {"sample": 1 << 31},
        {"position": 5},
    ]
    ids = [drawn(**variant) for variant in variants]
    assert len(set(ids)) == len(ids)
    assert drawn() == ids[0]
