"""Asynchronous saves: the state is copied into shared memory, and a process without torch writes it.

`manager` owns the memory, the writer process and the queue of one user of it; `writer_process` is that
process, and `writer_client` the trainer's side of it; `pending` is what the caller holds. Imported by `run`,
`groups` and `integrations`.
"""
