"""Transfer bytes between memory and data files: writing hashes and syncs them, reading verifies them.

No torch and no messages between ranks. `file_writer` writes one rank's files, `file_reader` executes a read
plan, `open_checkpoint` opens whatever can be loaded. Imported by `saving`, `loading`, `background` and
`maintenance`.
"""
