"""Ranks that hold other weights than their peers are found by what each has told."""

from __future__ import annotations

import torch

from lamplighter.train import replicas
from lamplighter.train.ranks import World


def _model(weights: list[torch.Tensor]) -> torch.nn.Module:
    return torch.nn.ParameterList([torch.nn.Parameter(one) for one in weights])


def _told(models: list[list[torch.Tensor]]) -> list[float]:
    """As the reduction adds them up."""
    every = [replicas.votes(World(rank, len(models)), 50, _model(weights)) for rank, weights in enumerate(models)]
    return torch.tensor(every).sum(0).tolist()


def _weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(30, 7, generator=generator),
        torch.randn(64, generator=generator).bfloat16(),
        torch.ones(3).double(),
    ]


def test_a_bit_of_any_weight_is_seen_and_the_rank_is_named_where_there_is_a_majority() -> None:
    assert replicas.judge(_told([_weights() for _ in range(3)]), 150, 100) is None
    for which in range(3):
        other = _weights()
        other[which].view(torch.int8 if which == 2 else other[which].dtype).view(-1)[2] += 1
        found = replicas.judge(_told([_weights(), other, _weights()]), 150, 100)
        assert found is not None and found.culprit == {"rank": 1, "step": 150}
        assert "rank 1 holds other weights than the 2 others, since a step between 101 and 150" in found.why
        found = replicas.judge(_told([_weights(), other]), 150, 100)
        assert found is not None and "rank" not in found.culprit and "no majority" in found.why


def test_two_weights_that_have_changed_places_are_seen_and_an_idle_rank_tells_nothing() -> None:
    one, two = torch.ones(4), torch.zeros(4)
    assert replicas.judge(_told([[one, two], [two, one]]), 50, 0) is not None
    assert replicas.judge([7.0, 7.0, 0.0], 50, 0) is None and replicas.judge([7.0, 0.0], 50, 0) is None


def test_every_step_tells_as_many_numbers_and_one_rank_none() -> None:
    model = _model(_weights())
    told = [replicas.votes(World(1, 2), step, model) for step in range(1, 101)]
    assert {len(one) for one in told} == {2} and [step for step, one in enumerate(told, 1) if any(one)] == [50, 100]
    assert replicas.votes(World(), 50, model) == []
