"""From the first process group to the end of the process: a watch beside training, and an end that comes."""
