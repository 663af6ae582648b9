"""This machine: environment, installed tools and GPU clocks."""
