"""Work on checkpoints that exist, for tools and models: find the checkpoint that a path names, rebuild its
index, compare its elements with those of another one."""
