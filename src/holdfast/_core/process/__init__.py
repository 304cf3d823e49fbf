"""The life of this process: its exit handlers, its own thread, its work in the background."""
