"""Opening, warming up and closing process groups, all ranks together, each under one deadline."""
