"""Imported once by the fork server, so that every rank starts with torch, DCP and Holdfast loaded.

First calls are then compared without the imports that a training script has at its top, on both sides.
"""

import torch
import torch.distributed
import torch.distributed.checkpoint
import torch.distributed.device_mesh
import torch.distributed.tensor  # noqa: F401

from holdfast import async_save, load, save  # noqa: F401
