"""Small modules that everything uses: values, options, deadlines, threads, files in shared folders."""
