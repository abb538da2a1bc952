"""Measuring how fast a device computes for a base model, and how much two processes on it cost each other."""
