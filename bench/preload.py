"""Imported once by the fork server, so that every rank starts with torch already loaded."""

import torch
import torch.distributed
import torch.distributed.checkpoint
import torch.distributed.device_mesh
import torch.distributed.tensor  # noqa: F401
