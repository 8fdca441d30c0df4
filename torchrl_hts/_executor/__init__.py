"""Executors step environments: gymnasium's, without torch, and TorchRL's."""
