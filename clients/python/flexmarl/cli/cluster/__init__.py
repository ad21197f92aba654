"""A local cluster: the services of one machine, run and watched by the command line."""
