"""Normalization layers; torch only."""
