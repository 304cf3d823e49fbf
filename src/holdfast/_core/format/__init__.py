"""The format on disk: files, indexes, digests, objects; and the foreign formats that Holdfast reads.

Every name and constant of the format stands in `names`. No torch. docs/format.md describes the format for
readers without Holdfast.
"""
