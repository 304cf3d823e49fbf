"""Bytes between memory and data files: hashed and synced on the way out, verified on the way in.

No torch and no messages between ranks. `file_writer` writes one rank's files, `file_reader` reads a plan,
`open_checkpoint` opens what can be loaded. Imported by `saving`, `loading`, `background` and `maintenance`.
"""
