"""Sessions: monitor the ranks from the first process group to process exit, and bound the time of the
exit."""
