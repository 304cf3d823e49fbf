"""The format on disk: files, indexes, digests, objects, and the formats of others that are read.

Every name and constant of the format stands in `names`. No torch. Described for readers without Holdfast in
docs/format.md.
"""
