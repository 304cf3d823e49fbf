"""Work on existing checkpoints: inspect, compare, verify, reindex, prune, fingerprint.

One module per task. All but `fingerprints` run in one process, and all but `fingerprints` and `same` without
torch. Imported by `cli`, `integrations` and the public names.
"""
