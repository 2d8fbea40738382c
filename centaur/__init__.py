"""CENTAUR: one differentially private representation, and a head for each client."""
