"""Asynchronous saves: the state is copied into shared memory, and a process without torch writes it.

`manager` owns the memory and the writer process of one thread or run folder; `writer_process` is that
process, and `writer_client` the trainer's side of it; `pending` is what the caller gets. Imported by `run`,
`groups` and `integrations`.
"""
