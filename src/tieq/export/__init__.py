"""Exporters: one module a container. Each writes what it is given and decides nothing."""
