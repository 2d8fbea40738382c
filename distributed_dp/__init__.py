"""Distributed differential privacy for federated learning."""
