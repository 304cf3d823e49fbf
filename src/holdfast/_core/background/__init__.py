"""Asynchronous saves: the state is copied into shared memory, and a process without torch writes it.

`queue` owns the memory and the writer processes of one thread or run folder; `writer_process` is the writer
process, and `writer_client` the trainer's side of it; `pending` is the handle that the caller gets. Imported
by `run` and `integrations`.
"""
