"""Views of a shard with the axes of the published tensor, and the reverse."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def as_published(ours: torch.Tensor, axes: Sequence[int], dims: int) -> torch.Tensor:
    """Return a view of `ours` with the axes of the published tensor: `axes` gives the published axis of each
    of ours. Our axes of length 1 that have none (-1) are removed; published axes that have none of ours get
    length 1.

    dims: the number of axes of the published tensor.
    """
    kept = [our_axis for our_axis, axis in enumerate(axes) if axis >= 0]
    view = ours.view([ours.shape[our_axis] for our_axis in kept]) if len(kept) < len(axes) else ours
    view = view.permute(sorted(range(len(kept)), key=lambda index: axes[kept[index]]))
    for axis in sorted(set(range(dims)) - set(axes)):
        view = view.unsqueeze(axis)
    return view


def as_ours(published: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """Return a view of `published` with the axes of ours: the reverse of `as_published`."""
    fixed = sorted(set(range(published.ndim)) - set(axes))
    view = published
    for axis in reversed(fixed):
        view = view.squeeze(axis)
    left = [axis for axis in range(published.ndim) if axis not in fixed]
    view = view.permute([left.index(axis) for axis in axes if axis >= 0])
    for our_axis, axis in enumerate(axes):
        if axis < 0:
            view = view.unsqueeze(our_axis)
    return view
