"""What to expect of the collector with a workload of yours: ``python -m torchrl_hts.bench``."""
