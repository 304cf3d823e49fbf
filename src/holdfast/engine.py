"""Weights inside an inference engine: `from holdfast import engine`.

`fingerprint(model)`, called in each worker of vLLM, gives the fingerprints of its weights under the names of
the published model. `holdfast.same` compares them with a trainer's, a checkpoint or a published folder.
"""

from holdfast._models.equality.engine import engine_fingerprint as fingerprint

__all__ = ["fingerprint"]
