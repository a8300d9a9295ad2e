"""Decisions: state in, frozen decision or sentence out. Imports config, types and metric names; no clock, no I/O."""
