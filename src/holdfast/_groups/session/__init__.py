"""Watch the ranks from the first process group to the end of the process, and bound the time of that end."""
